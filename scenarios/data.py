"""Where a scenario's data comes from: the folder that `FLEXGEN_HELM_DATA` names, else the hub, else
a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from flexgen_helm.errors import UsageError
from flexgen_helm.paths import data_dir

T = TypeVar("T")


def read_local(name: str, parse: Callable[[str], T]) -> T | None:
    """Return the parsed file `name` of the data folder; None where there is no folder or no such
    file.

    Raises `UsageError` for a file that cannot be read, which must not be mistaken for an absent
    one.
    """
    folder = data_dir()
    path = folder / name if folder is not None else None
    if path is None or not path.exists():
        return None
    try:
        # As bytes, because reading as text would turn other line ends into '\n'.
        return parse(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read as scenario data: {type(error).__name__}: {error}"
        ) from error


def read_hub(title: str, name: str, repository: str, config: str, column: str) -> list[str]:
    """Return the texts of the test split of a data set of the hub, or of `datasets`' local cache.

    title, name: the data set for people, and its file in a data folder.
    Raises `UsageError` with one sentence that names both ways to get the data.
    """
    texts, reason = _load_hub(repository, config, column)
    if reason is None:
        return list(texts)
    folder = data_dir()
    missing = "it is not set" if folder is None else f"{folder / name} does not exist"
    raise UsageError(
        f"the data of {title} is not here: set FLEXGEN_HELM_DATA to a folder with {name} "
        f"({missing}), or let `datasets` read {repository} ({config}) from the hub once, with a "
        f"network and HF_HUB_OFFLINE unset ({reason})"
    )


@cache  # a suite asks several times, and an unreachable hub takes half a minute
def _load_hub(repository: str, config: str, column: str) -> tuple[list[str], str | None]:
    """Return the texts, and why there are none."""
    try:
        from datasets import load_dataset

        rows: Any = load_dataset(repository, config, split="test")
        return [row[column] for row in rows], None
    # of `datasets`, the hub's client, HTTP and Arrow, which share no base class
    except Exception as error:
        message = (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
        return [], f"{type(error).__name__}: {message}"


def json_lines(column: str) -> Callable[[str], list[str]]:
    """Return a parser of JSON lines that takes the text in `column` of each."""

    def parse(content: str) -> list[str]:
        texts = [json.loads(line)[column] for line in content.split("\n") if line.strip()]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"'{column}' is not text in every line")
        return texts

    return parse
