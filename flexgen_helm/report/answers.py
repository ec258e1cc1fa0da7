"""What a model answered to an instance, from its request state in `scenario_state.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexgen_helm.tokenizer.token_bytes import helm_bytes


@dataclass(frozen=True)
class Answer:
    """What a model answered to an instance, in the first trial.

    prompt: of the request that gave the answer.
    references: the correct ones.
    text: generated, or the reference with the highest score.
    logprob: of the answer's tokens; None if it is not known.
    """

    prompt: str
    references: Sequence[str]
    text: str
    logprob: float | None


def is_choice(settings: Mapping[str, Any]) -> bool:
    """Whether the answer is the most probable reference: HELM scores each by a request of its own.

    settings: the adapter spec of a run, as for `is_answered`.
    """
    return str(settings.get("method", "")).startswith("multiple_choice_separate")


def is_answered(settings: Mapping[str, Any]) -> bool:
    """Whether instances have answers: text that is only scored, such as a page of WikiText, has
    none.
    """
    return settings.get("method") != "language_modeling"


def generated_answer(state: Mapping[str, Any]) -> Answer:
    """Return the generated text; where a letter stands for each reference, with its reference."""
    text, logprob = state_text(state), _completion(state).get("logprob")
    correct, by_letter = _correct_references(state), state.get("output_mapping", {})
    if by_letter:
        correct = [
            f"{letter}: {reference}"
            for letter, reference in by_letter.items()
            if reference in correct
        ]
        if (letter := text.strip()) in by_letter:
            text = f"{text}: {by_letter[letter]}"
    return Answer(_prompt(state), correct, text, None if logprob is None else float(logprob))


def chosen_answer(state: Mapping[str, Any]) -> Answer:
    """Return the reference that was chosen, with the log-probability of its tokens."""
    text = state["instance"]["references"][state["reference_index"]]["output"]["text"]
    logprob = _logprob_of_end(_completion(state), text)
    return Answer(_prompt(state).removesuffix(text), _correct_references(state), text, logprob)


def _logprob_of_end(completion: Mapping[str, Any], text: str) -> float | None:
    """Return the log-probability of the last tokens, as many as have the bytes of `text`.

    None where all tokens have fewer.
    """
    total, missing_bytes = 0.0, len(text.encode())
    for token in reversed(completion.get("tokens", ())):
        if missing_bytes <= 0:
            break
        total += float(token["logprob"])
        missing_bytes -= len(helm_bytes(token["text"]))
    return total if missing_bytes <= 0 else None


def _completion(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first completion; {} without any."""
    return dict((state.get("result", {}).get("completions") or [{}])[0])


def state_text(state: Mapping[str, Any]) -> str:
    return str(_completion(state).get("text", ""))


def _prompt(state: Mapping[str, Any]) -> str:
    request = state.get("request", {})
    messages = request.get("messages")
    if messages:
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return str(request.get("prompt", ""))


def _correct_references(state: Mapping[str, Any]) -> list[str]:
    references = state["instance"].get("references", ())
    return [
        reference["output"]["text"]
        for reference in references
        if "correct" in reference.get("tags", ())
    ]
