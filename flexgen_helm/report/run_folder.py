"""The files in a run's folder: their names, and what HELM's say of instances and settings."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexgen_helm.files import read_object

# In the order in which a run writes them.
SPEC_FILE, STATE_FILE = "run_spec.json", "scenario_state.json"
RUN_FILE, INSTANCE_STATS_FILE = "flexgen_run.json", "per_instance_stats.json"
DRY_RUN_FOLDER = "dry_run"  # below a run's folder: what a dry run writes
# HELM's flags for entries of an adapter spec.
_FLAGS = {"max_eval_instances": "-m", "num_train_trials": "-t"}
# Instances of the data sets of this project's scenarios; HELM's own tell no size.
_DATA_SET_SIZES = {"lambada": 5153, "wikitext": 62}
# Entries of an adapter spec that differ between the runs of a comparison by intention.
_NOT_COMPARED = ("model", "model_deployment", "max_eval_instances")
# Keys of a request state; "instance" is the first. Quotes within JSON strings are escaped, so no
# text contains these bytes.
_INSTANCE_KEY, _REQUEST_KEY = b'"instance": {', b'"request": {'


def read_instances(folder: Path) -> dict[str, str]:
    """Return id -> digest of text and references, for each instance without a perturbation.

    Empty if HELM's file is missing or damaged. The answers, most of that file, are not parsed.
    """
    digests = {}
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        for instance, _ in _unperturbed_states(folder):
            text = json.dumps([instance["input"], instance.get("references")], sort_keys=True)
            digests[str(instance["id"])] = hashlib.blake2b(
                text.encode(), digest_size=16
            ).hexdigest()
        return digests
    return {}


def read_states(folder: Path, wanted: Container[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield HELM's request states of instances without a perturbation.

    wanted: ids of instances; None for all.
    Ends where the file is missing or damaged.
    """
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        for instance, text in _unperturbed_states(folder):
            if wanted is None or instance["id"] in wanted:
                yield json.JSONDecoder().raw_decode(text.decode())[0]


def _unperturbed_states(folder: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield instance and JSON text of each request state without a perturbation.

    Only the instance is parsed: a file may have gigabytes of tokens and log-probabilities.
    """
    decoder = json.JSONDecoder()
    with (
        (folder / STATE_FILE).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        position = content.find(_INSTANCE_KEY)
        while position >= 0:
            start = position + len(_INSTANCE_KEY) - 1
            following = content.find(_INSTANCE_KEY, start)
            request = content.find(_REQUEST_KEY, start)
            end = request if request >= 0 else len(content)
            instance, _ = decoder.raw_decode(content[start:end].decode())
            if "perturbation" not in instance:
                state_start = content.rfind(b"{", 0, position)
                state_end = following if following >= 0 else len(content)
                yield instance, content[state_start:state_end]
            position = following


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the adapter spec and the scenario's arguments of a run; {} if HELM's file is missing
    or damaged.
    """
    spec = read_object(folder / SPEC_FILE)
    adapter = {
        key: value
        for key, value in spec.get("adapter_spec", {}).items()
        if key not in _NOT_COMPARED
    }
    return {**adapter, **spec.get("scenario_spec", {}).get("args", {})}


def data_set_size(folder: Path, scenario: str, num_instances: int) -> int | None:
    """Return how many instances a run's data set has; None if that is not known.

    num_instances: that HELM found. Where it was asked for more, these are all.
    """
    return _DATA_SET_SIZES.get(scenario) or (
        num_instances if 0 < num_instances < asked_instances(folder) else None
    )


def asked_instances(folder: Path) -> int:
    """Return the -m that a run's prompts were made with; 0 where HELM's file does not say it."""
    limit = read_object(folder / SPEC_FILE).get("adapter_spec", {}).get("max_eval_instances")
    return limit if isinstance(limit, int) else 0


def differing_settings(old: Mapping[str, Any], new: Mapping[str, Any], separator: str) -> str:
    """Name the settings that differ, with both values; '' if none does.

    separator: between the values: ', now ' gives '-m 4, now 10'.
    """
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    return "; ".join(
        f"{_FLAGS.get(key, key)} {_short_repr(old.get(key))}{separator}{_short_repr(new.get(key))}"
        for key in keys
    )


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
