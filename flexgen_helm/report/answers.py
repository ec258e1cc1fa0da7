"""The answers of a run, from HELM's file of its requests."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.files import read_object
from flexgen_helm.tokenizer.token_bytes import helm_bytes


@dataclass(frozen=True)
class Answer:
    """What a model answered to an instance, in the first trial.

    prompt: of the request that gave the answer. references: the right ones.
    text: generated, or the reference with the highest score. logprob: of the answer's tokens; None
        if it is not known.
    """

    prompt: str
    references: Sequence[str]
    text: str
    logprob: float | None


def is_choice(settings: Mapping[str, Any]) -> bool:
    """Whether the answer is the reference that the model finds most probable, with a request for
    each.
    """
    return str(settings.get("method", "")).startswith("multiple_choice_separate")


def is_answered(settings: Mapping[str, Any]) -> bool:
    """Whether instances have answers: text that is only scored, such as a page of WikiText, has
    none.
    """
    return settings.get("method") != "language_modeling"


def generated_answer(state: Mapping[str, Any]) -> Answer:
    text, mapping, right = state_text(state), state.get("output_mapping", {}), _right(state)
    logprob = _completion(state).get("logprob")
    if mapping:  # a letter stands for each reference
        right = [
            f"{letter}: {reference}" for letter, reference in mapping.items() if reference in right
        ]
        text = f"{text}: {mapping[text.strip()]}" if text.strip() in mapping else text
    return Answer(_prompt(state), right, text, None if logprob is None else float(logprob))


def chosen_answer(state: Mapping[str, Any]) -> Answer:
    """Return the reference that was chosen, with the log-probability of its tokens."""
    text = state["instance"]["references"][state["reference_index"]]["output"]["text"]
    logprob = _logprob_of_end(_completion(state), text)
    return Answer(_prompt(state).removesuffix(text), _right(state), text, logprob)


def _logprob_of_end(completion: Mapping[str, Any], text: str) -> float | None:
    """Add up the last tokens that make up `text`, or as many bytes of other spellings."""
    total, missing = 0.0, len(text.encode())
    for token in reversed(completion.get("tokens", ())):
        if missing <= 0:
            break
        total, missing = total + float(token["logprob"]), missing - len(helm_bytes(token["text"]))
    return total if missing <= 0 else None


def _completion(state: Mapping[str, Any]) -> Mapping[str, Any]:
    completions = state.get("result", {}).get("completions") or [{}]
    first: Mapping[str, Any] = completions[0]
    return first


def state_text(state: Mapping[str, Any]) -> str:
    return str(_completion(state).get("text", ""))


def _prompt(state: Mapping[str, Any]) -> str:
    request = state.get("request", {})
    messages = request.get("messages")
    if messages:
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return str(request.get("prompt", ""))


def _right(state: Mapping[str, Any]) -> list[str]:
    references = state["instance"].get("references", ())
    return [
        reference["output"]["text"]
        for reference in references
        if "correct" in reference.get("tags", ())
    ]


# What a run was asked, from the files in its folder: its instances and its settings.

# In the order in which a run writes them.
SPEC_FILE, STATE_FILE = "run_spec.json", "scenario_state.json"
RUN_FILE, LAST_FILE = "flexgen_run.json", "per_instance_stats.json"
DRY_RUN_FOLDER = "dry_run"  # below a run's folder: what a dry run writes
_FLAGS = {"max_eval_instances": "-m", "num_train_trials": "-t"}
# Instances of the data sets of this project's scenarios.
_SIZES = {"lambada": 5153, "wikitext": 62}
# Entries of an adapter spec that may differ between runs of one comparison.
_NOT_COMPARED = ("model", "model_deployment", "max_eval_instances")
# "instance" is the first key of a request state. No JSON string has an unescaped quote, so none
# contains these.
_INSTANCE, _REQUEST = b'"instance": {', b'"request": {'


def read_instances(folder: Path) -> dict[str, str]:
    """Return id -> digest of text and references, for each instance of a run without a
    perturbation.

    Empty if HELM's file is missing or damaged. The answers, most of that file, are not parsed.
    """
    digests = {}
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        for instance, _ in _requests(folder):
            text = json.dumps([instance["input"], instance.get("references")], sort_keys=True)
            digests[str(instance["id"])] = hashlib.blake2b(
                text.encode(), digest_size=16
            ).hexdigest()
        return digests
    return {}


def read_states(folder: Path, wanted: Container[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield HELM's request states of instances without a perturbation; wanted: ids, all if None.

    Ends where the file is missing or damaged.
    """
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        for instance, text in _requests(folder):
            if wanted is None or instance["id"] in wanted:
                yield json.JSONDecoder().raw_decode(text.decode())[0]


def _requests(folder: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the instance and the JSON text, which is not parsed yet, of each request state."""
    decoder = json.JSONDecoder()
    with (
        (folder / STATE_FILE).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        position = content.find(_INSTANCE)
        while position >= 0:
            start, following = position + len(_INSTANCE) - 1, content.find(_INSTANCE, position + 1)
            end = content.find(_REQUEST, start)
            instance, _ = decoder.raw_decode(
                content[start : end if end >= 0 else len(content)].decode()
            )
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
    """Return how many instances a run's data set has; None if HELM found as many as it was asked
    for.
    """
    return _SIZES.get(scenario) or (
        num_instances if 0 < num_instances < asked_instances(folder) else None
    )


def asked_instances(folder: Path) -> int:
    """Return the -m that a run's prompts were made with; 0 where HELM's file does not say it."""
    limit = read_object(folder / SPEC_FILE).get("adapter_spec", {}).get("max_eval_instances")
    return limit if isinstance(limit, int) else 0


def differing_settings(old: Mapping[str, Any], new: Mapping[str, Any], joint: str) -> str:
    """Name the settings that differ, with both values: '-m 4, now 10', where `joint` is ', now ';
    '' if none does.
    """
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    return "; ".join(
        f"{_FLAGS.get(key, key)} {_shown(old.get(key))}{joint}{_shown(new.get(key))}"
        for key in keys
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
