"""The engine on a fixed workload of random tokens: what a measurement's own process runs."""

from __future__ import annotations

import random
import resource
from collections.abc import Mapping
from typing import Any

from flexgen_helm.benchmarks.common import tokens_per_s
from flexgen_helm.benchmarks.process import in_own_process

_WARM_UP_PROMPT, _WARM_UP_OUTPUT = 8, 2


def prompts(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts without a shared prefix, which prefix sharing would compute once."""
    draw = random.Random(0)
    return [[row % vocab_size, *(draw.randrange(vocab_size) for _ in range(length - 1))] for row in range(rows)]


def run_engine(**block: Any) -> dict[str, Any]:
    """Run a block once, and return its run record as JSON. block: arguments of `run_blocks`."""
    (record,) = run_blocks(**block)
    return {
        **{key: record[key] for key in ("latency_s", "prefill_s", "decode_s", "flops", "bytes", "time_s", "policy")},
        **{key: record[key] for key in ("peak_bytes", "achieved_placement", "schedule", "hardware", "roofline_s")},
        **run_sizes(block["rows"], block["prompt"], block["output"]),
    }


def alternate(sides: Mapping[str, Mapping[str, Any]], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Run blocks by turns, each in a process of its own, and return the records of each side.

    sides: label -> arguments of `run_engine`.
    """
    from flexgen_helm.cli.console import say

    records: dict[str, list[dict[str, Any]]] = {label: [] for label in sides}
    for repeat in range(repeats):
        for label, block in sides.items():
            record = in_own_process(run_engine, block)
            records[label].append(record)
            say(
                f"{label}: {record['latency_s']:.2f} s, of which {record['time_s']['wait']:.1f} s waiting, "
                f"{tokens_per_s(record):.2f} token/s ({repeat + 1} of {repeats})"
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
    warm: bool = False,
    warm_output: int | None = None,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Run the same block `repeats` times after a warm-up, and return the run records.

    engine: arguments of `Engine.from_pretrained`.
    warm: warm up with the whole block, which touches its memory; else with a few tokens. On a virtual machine the
        first touch takes longer than computing, and only the first block of a process pays for it.
    warm_output: so many output tokens of that block, behind prompts that are longer by the others.
    """
    from flexgen_helm import Engine, GenerationRequest
    from flexgen_helm.request import MemoryLimits

    records = []
    with Engine.from_pretrained(model, limits=MemoryLimits(**limits), weights="dummy", **engine) as loaded:

        def requests(count: int, length: int, tokens: int) -> list[GenerationRequest]:
            return [
                GenerationRequest(prompt_token_ids=ids, max_tokens=tokens, ignore_eos=True)
                for ids in prompts(count, length, loaded.config.vocab_size)
            ]

        block = requests(rows, prompt, output)
        if not warm:
            loaded.run(requests(1, min(prompt, _WARM_UP_PROMPT), _WARM_UP_OUTPUT))
        else:
            loaded.run(block if warm_output is None else requests(rows, prompt + output - warm_output, warm_output))
        for _ in range(repeats):
            for result in loaded.run(block):
                if result.error is not None:
                    raise result.error
            records.append(loaded.last_run)
    return records


def run_sizes(rows: int, prompt: int, output: int) -> dict[str, int]:
    """Return the part of a record that is counted instead of measured, and this process's peak resident memory."""
    return {
        "rows": rows,
        "prompt_tokens": rows * prompt,
        "output_tokens": rows * output,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
