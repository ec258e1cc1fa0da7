"""Where a scenario's data comes from: the folder that `FLEXGEN_HELM_DATA` names, else the hub, else a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flexgen_helm.checkpoint.paths import data_dir
from flexgen_helm.errors import UsageError

T = TypeVar("T")
# Why the hub could not be read: it takes half a minute to find out, and a suite asks for the same data several times.
_unreachable: dict[str, str] = {}


def read_local(name: str, parse: Callable[[str], T]) -> T | None:
    """The content of the file `name` of the data folder; None where there is no folder or no such file.

    Raises `UsageError` for a file that cannot be read, which must not be mistaken for an absent one.
    """
    folder = data_dir()
    path = folder / name if folder is not None else None
    if path is None or not path.exists():
        return None
    try:
        # As bytes, because reading as text would turn other line ends into '\n'.
        return parse(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read as scenario data: {type(error).__name__}: {error}") from error


def read_hub(title: str, name: str, repository: str, config: str, column: str) -> list[str]:
    """The texts of the test split of a data set of the hub, or of what `datasets` kept of it.

    Raises `UsageError` with one sentence that names both ways to get the data.
    """
    if repository not in _unreachable:
        try:
            from datasets import load_dataset

            rows: Any = load_dataset(repository, config, split="test")
            return [row[column] for row in rows]
        except Exception as error:  # of `datasets`, the hub's client, HTTP and Arrow, which share no base class
            reason = (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
            _unreachable[repository] = f"{type(error).__name__}: {reason}"
    raise UsageError(
        f"the data of {title} is not here: set FLEXGEN_HELM_DATA to a folder with {name} ({_looked_for(name)}), "
        f"or let `datasets` read {repository} ({config}) from the hub once, with a network and HF_HUB_OFFLINE unset "
        f"({_unreachable[repository]})"
    )


def _looked_for(name: str) -> str:
    folder = data_dir()
    return "it is not set" if folder is None else f"{Path(folder) / name} does not exist"


def json_lines(column: str) -> Callable[[str], list[str]]:
    """A parser of one JSON object a line, for the texts in `column`."""

    def parse(content: str) -> list[str]:
        texts = [json.loads(line)[column] for line in content.split("\n") if line.strip()]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"'{column}' is not text in every line")
        return texts

    return parse
