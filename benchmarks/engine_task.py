"""The engine on a fixed workload of random tokens: what a measurement's own process runs."""

from __future__ import annotations

import random
import resource
from typing import Any

_WARM_UP_PROMPT, _WARM_UP_OUTPUT = 8, 2


def prompts(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random prompts without a common beginning (prefix sharing would shorten the work)."""
    draw = random.Random(0)
    return [[row % vocab_size, *(draw.randrange(vocab_size) for _ in range(length - 1))] for row in range(rows)]


def run_engine(
    *,
    model: str,
    engine: dict[str, Any],
    limits: dict[str, int],
    rows: int,
    prompt: int,
    output: int,
    warm: bool = False,
) -> dict[str, Any]:
    """The record of a run behind a short one; engine: arguments of `Engine.from_pretrained`.

    warm: the short one is another run of the same block, so that its memory has been touched: on a virtual machine
    that takes longer than computing with it, and only a process's first block pays for it.
    """
    from flexgen_helm import Engine, GenerationRequest
    from flexgen_helm.request import MemoryLimits

    if engine.get("link_gb_s") is not None:
        engine = {**engine, "link_gb_s": tuple(engine["link_gb_s"])}
    with Engine.from_pretrained(model, limits=MemoryLimits(**limits), weights="dummy", **engine) as loaded:
        vocabulary = loaded.config.vocab_size

        def requests(count: int, length: int, tokens: int) -> list[GenerationRequest]:
            return [
                GenerationRequest(prompt_token_ids=ids, max_tokens=tokens, ignore_eos=True)
                for ids in prompts(count, length, vocabulary)
            ]

        loaded.run(
            requests(rows, prompt, output) if warm else requests(1, min(prompt, _WARM_UP_PROMPT), _WARM_UP_OUTPUT)
        )
        for result in loaded.run(requests(rows, prompt, output)):
            if result.error is not None:
                raise result.error
        record = loaded.last_run
    return {
        **{key: record[key] for key in ("latency_s", "prefill_s", "decode_s", "flops", "bytes", "time_s", "policy")},
        **{key: record[key] for key in ("peak_bytes", "achieved_placement", "schedule", "hardware")},
        "rows": rows,
        "prompt_tokens": rows * prompt,
        "output_tokens": rows * output,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
