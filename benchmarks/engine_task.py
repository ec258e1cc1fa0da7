"""The engine on a fixed workload of random tokens: what a measurement's own process runs."""

from __future__ import annotations

import random
import resource
from collections.abc import Mapping
from typing import Any

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.benchmarks.common import tokens_per_s
from flexgen_helm.benchmarks.process import in_own_process
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.tiers import MemoryLimits


def prompts(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts without a shared prefix, which prefix sharing would compute once."""
    draw = random.Random(0)
    return [
        [row % vocab_size, *(draw.randrange(vocab_size) for _ in range(length - 1))]
        for row in range(rows)
    ]


def run_engine(**block: Any) -> dict[str, Any]:
    """Run a block once, and return its run record. block: arguments of `run_blocks`."""
    return run_blocks(**block)[0]


def alternate(
    sides: Mapping[str, Mapping[str, Any]], repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Run blocks by turns, each in a process of its own, and return the records of each side.

    sides: label -> arguments of `run_engine`.
    """
    records: dict[str, list[dict[str, Any]]] = {label: [] for label in sides}
    for repeat in range(repeats):
        for label, block in sides.items():
            record = in_own_process(run_engine, block)
            records[label].append(record)
            print(
                f"{label}: {record['latency_s']:.2f} s, of which {record['time_s']['wait']:.1f} s "
                f"waiting, {tokens_per_s(record):.2f} token/s ({repeat + 1} of {repeats})"
            )
    return records


def run_blocks(
    *,
    model: str,
    engine: Mapping[str, Any],
    limits: Mapping[str, int],
    rows: int,
    prompt: int,
    output: int,
    warm_output: int | None = None,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Run the same block `repeats` times after a warm-up, and return the run records.

    The warm-up is the whole block, which touches its memory: on a virtual machine the first touch
    takes longer than computing, and only the first block of a process pays for it.

    engine: arguments of `Engine.from_pretrained`.
    warm_output: so many output tokens in the warm-up, behind prompts that are longer by the others.
    """
    records = []
    with Engine.from_pretrained(
        model, limits=MemoryLimits(**limits), weights="dummy", **engine
    ) as loaded:

        def run(tokens: int) -> dict[str, Any]:
            ids = prompts(rows, prompt + output - tokens, loaded.model_config.vocab_size)
            settings: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
            results = loaded.run([GenerationRequest(prompt_token_ids=x, **settings) for x in ids])
            for error in (result.error for result in results if result.error is not None):
                raise error
            assert loaded.last_run is not None
            return dict(loaded.last_run)

        run(warm_output or output)
        for _ in range(repeats):
            records.append({**run(output), **run_sizes(rows, prompt, output)})
    return records


def block_bytes(config: ModelConfig, rows: int, prompt: int, output: int) -> int:
    """Return the bytes of a block's KV cache and hidden states in float32."""
    cache = (prompt + output) * 2 * config.num_cache_layers * config.kv_size
    return 4 * rows * (cache + prompt * config.hidden_size)


def run_sizes(rows: int, prompt: int, output: int) -> dict[str, int]:
    """Return what of a record is counted instead of measured, and this process's peak memory."""
    return {
        "rows": rows,
        "prompt_tokens": rows * prompt,
        "output_tokens": rows * output,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
