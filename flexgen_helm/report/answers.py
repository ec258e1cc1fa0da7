"""The answers of a run, from HELM's file of its requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexgen_helm.report.run_files import read_states

if TYPE_CHECKING:
    from flexgen_helm.report.scores import RunScores


@dataclass(frozen=True)
class Answer:
    """What a model answered to an instance, in the first trial.

    prompt: of the request that gave the answer. references: the right ones.
    text: generated, or the reference with the highest score. logprob: of the answer's tokens; None if it is not known.
    """

    prompt: str
    references: Sequence[str]
    text: str
    logprob: float | None


def is_choice(settings: Mapping[str, Any]) -> bool:
    """Whether the answer is the reference that the model finds most probable, with a request for each."""
    return str(settings.get("method", "")).startswith("multiple_choice_separate")


def is_answered(settings: Mapping[str, Any]) -> bool:
    """Whether instances have answers: text that is only scored, such as a page of WikiText, has none."""
    return settings.get("method") != "language_modeling"


def read_texts(run: RunScores) -> dict[str, str]:
    """Return id -> answer, as text or as the number of the chosen reference; {} if they are not known."""
    if run.folder is None or not is_answered(run.settings):
        return {}
    if is_choice(run.settings):
        chosen = run.instances.get("predicted_index")
        return {} if chosen is None else {str(key): str(value) for key, value in chosen.items()}
    texts: dict[str, list[str]] = {}
    for state in read_states(run.folder):
        texts.setdefault(state["instance"]["id"], []).append(_text(state))
    return {key: "\0".join(answers) for key, answers in texts.items()}


def read_answers(run: RunScores, wanted: Collection[str]) -> dict[str, Answer]:
    """Return the answers of the instances `wanted`, by id."""
    if run.folder is None:
        return {}
    states: dict[str, list[dict[str, Any]]] = {}
    for state in read_states(run.folder, wanted):
        if state.get("train_trial_index", 0) == 0:
            states.setdefault(state["instance"]["id"], []).append(state)
    if not is_choice(run.settings):
        return {key: _generated(of_instance[0]) for key, of_instance in states.items()}
    chosen = run.instances.get("predicted_index", {})
    found = {key: _chosen(of_instance, chosen.get(key)) for key, of_instance in states.items()}
    return {key: answer for key, answer in found.items() if answer is not None}


def _generated(state: Mapping[str, Any]) -> Answer:
    text, mapping = _text(state), state.get("output_mapping", {})
    completion = _completion(state)
    logprob = completion.get("logprob")
    right = _right(state)
    if mapping:  # a letter stands for each reference
        letters = [letter for letter, reference in mapping.items() if reference in right]
        right = [f"{letter}: {mapping[letter]}" for letter in letters]
        text = f"{text}: {mapping[text.strip()]}" if text.strip() in mapping else text
    return Answer(_prompt(state), right, text, None if logprob is None else float(logprob))


def _chosen(states: Iterable[Mapping[str, Any]], number: float | None) -> Answer | None:
    """Return the reference that was chosen, with the log-probability of its tokens; None if it is not known."""
    for state in states:
        if state.get("reference_index") == number and state.get("request_mode", "original") == "original":
            text = state["instance"]["references"][state["reference_index"]]["output"]["text"]
            prompt = _prompt(state)
            return Answer(prompt.removesuffix(text), _right(state), text, _logprob_of_end(_completion(state), text))
    return None


def _logprob_of_end(completion: Mapping[str, Any], text: str) -> float | None:
    """Add up the last tokens that make up `text`, or as many characters of other spellings."""
    total, length = 0.0, 0
    for token in reversed(completion.get("tokens", ())):
        if length >= len(text):
            return total
        total, length = total + float(token["logprob"]), length + len(token["text"])
    return total if length >= len(text) else None


def _completion(state: Mapping[str, Any]) -> Mapping[str, Any]:
    completions = state.get("result", {}).get("completions") or [{}]
    first: Mapping[str, Any] = completions[0]
    return first


def _text(state: Mapping[str, Any]) -> str:
    return str(_completion(state).get("text", ""))


def _prompt(state: Mapping[str, Any]) -> str:
    request = state.get("request", {})
    messages = request.get("messages")
    if messages:
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return str(request.get("prompt", ""))


def _right(state: Mapping[str, Any]) -> list[str]:
    references = state["instance"].get("references", ())
    return [reference["output"]["text"] for reference in references if "correct" in reference.get("tags", ())]
