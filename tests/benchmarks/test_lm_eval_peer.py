"""lm-evaluation-harness's Hugging Face backend as a peer of `bench clients`."""

from __future__ import annotations

import pytest

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.benchmarks import lm_eval_task
from flexgen_helm.benchmarks.lm_eval_task import answer, unsupported


def request(**changes: object) -> dict[str, object]:
    return {"prompt": "the quick", "max_tokens": 5, "stop_sequences": [], "temperature": 0.0, "num_completions": 1,
            "echo_prompt": False, **changes}  # fmt: skip


def test_what_the_backend_cannot_give_is_said() -> None:
    assert unsupported([request(), request(max_tokens=0, echo_prompt=True)]) is None
    assert "either scores" in str(unsupported([request(echo_prompt=True)]))
    for changes in ({"temperature": 0.5}, {"num_completions": 2}):
        assert "greedy" in str(unsupported([request(**changes)]))


def test_it_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lm_eval_task.missing() is None
    monkeypatch.setattr(lm_eval_task, "find_spec", lambda module: None)
    assert "pip install flexgen_helm[lm-eval]" in str(lm_eval_task.missing())


@pytest.mark.slow
def test_its_answers_come_in_the_order_of_the_requests(tiny) -> None:
    """Of other lengths than the batches are sorted by, with a stop string, and one request that only scores."""
    path = tiny("llama").path
    prompts = ["the quick brown fox", "a", "jumps over the lazy dog and the quick", "fox"]
    asked = [request(prompt=prompt, stop_sequences=["q"] if len(prompt) > 30 else []) for prompt in prompts]
    run = answer(path, [*asked, request(max_tokens=0, echo_prompt=True)], 2)
    with Engine.from_pretrained(path) as engine:
        ours = engine.run(
            [GenerationRequest(prompt=own["prompt"], max_tokens=5, stop=own["stop_sequences"]) for own in asked]
        )
    assert run.texts == [*(result.completions[0].text for result in ours), ""]
    assert 0 < run.ready_s < run.seconds
