"""lm-evaluation-harness's Hugging Face backend as a peer of `bench clients`: HELM's prompts, in its own batches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks.peer_runs import Peer, PeerRun
from flexgen_helm.benchmarks.process import in_own_process

# Sequences of a batch; the better one counts.
BATCHES = (8, 32)


def missing() -> str | None:
    """Say why this peer cannot be measured here; None if it can."""
    return None if find_spec("lm_eval") else "lm_eval is not installed; `pip install flexgen_helm[lm-eval]` brings it"


def unsupported(requests: Sequence[Mapping[str, Any]]) -> str | None:
    """Say which of HELM's requests the backend cannot answer; None if none."""
    if any(request["echo_prompt"] and request["max_tokens"] for request in requests):
        return "lm-evaluation-harness either scores a prompt or continues it"
    if any(request["temperature"] or request["num_completions"] != 1 for request in requests):
        return "only greedy requests for one completion are compared with lm-evaluation-harness"
    return None


def peer() -> Peer:
    return Peer("lm_eval", "lm-evaluation-harness's hf backend", {"lm_eval": version("lm_eval")})


def answer(model: Path, requests: Sequence[Mapping[str, Any]], batch: int) -> PeerRun:
    """Answer HELM's requests with the `transformers` folder `model` in a process of its own."""
    fields = ("prompt", "max_tokens", "stop_sequences")
    asked = [{field: request[field] for field in fields} for request in requests]
    began = time.perf_counter()
    found = in_own_process(answer_all, {"folder": str(model), "requests": asked, "batch": batch})
    seconds = time.perf_counter() - began
    return PeerRun(seconds, seconds - found["answers_s"], found["texts"], (f"batch_size={batch}", "dtype=float32"))


def answer_all(*, folder: str, requests: Sequence[Mapping[str, Any]], batch: int) -> dict[str, Any]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=folder, dtype="float32", batch_size=batch, device="cpu")
    began = time.perf_counter()
    generating = [number for number, request in enumerate(requests) if request["max_tokens"]]
    scoring = [number for number, request in enumerate(requests) if not request["max_tokens"]]

    def instance(kind: str, number: int, *more: Any) -> Instance:
        return Instance(kind, {}, (requests[number]["prompt"], *more), number)  # type: ignore[arg-type]

    def settings(number: int) -> dict[str, Any]:
        request = requests[number]
        return {"until": list(request["stop_sequences"]), "max_gen_toks": request["max_tokens"], "do_sample": False}

    texts = [""] * len(requests)
    if generating:
        asked = [instance("generate_until", number, settings(number)) for number in generating]
        for number, text in zip(generating, model.generate_until(asked, disable_tqdm=True)):
            texts[number] = text
    if scoring:
        model.loglikelihood_rolling([instance("loglikelihood_rolling", number) for number in scoring])
    return {"texts": texts, "answers_s": time.perf_counter() - began}
