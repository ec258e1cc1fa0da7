"""Run a model with less memory than its weights need: the rest is streamed from the disk, and
answers stay the same.

    python examples/larger_than_memory.py [MODEL] [BYTES OF HOST MEMORY] [OFFLOAD FOLDER]

The default gives a 135M model, 270 MB in 16 bits, 160 MB of host memory.
"""

from __future__ import annotations

import sys

from flexgen_helm import Engine, GenerationRequest, MemoryLimits

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "The opposite of hot is",
    "Two plus two is",
]


def main(
    model: str = "smollm2-135m-instruct-q4_1",
    cpu_bytes: str = "160000000",
    offload_dir: str = "offload",
) -> None:
    # One large run is fast, many small ones are not: each pass reads the weights once, for all
    # sequences together.
    requests = [GenerationRequest(prompt=prompt, max_tokens=8, stop=["\n"]) for prompt in PROMPTS]

    # The limit covers weights, KV cache, and buffers. A GPU has a limit of its own:
    # MemoryLimits(gpu=…).
    limit = int(cpu_bytes)
    with Engine.from_pretrained(
        model, limits=MemoryLimits(cpu=limit), offload_dir=offload_dir
    ) as engine:
        results = engine.run(requests)
        record = engine.last_run

    for prompt, result in zip(PROMPTS, results):
        if result.error is not None:  # a request fails alone
            raise result.error
        print(f"{prompt!r} -> {result.completions[0].text!r}")
    on_disk = record["achieved_placement"]["weights"]["disk"]
    read = record["bytes"]["disk_to_cpu"]["weights"]
    print(
        f"schedule {record['schedule']}: {on_disk:.0%} of the weights on the disk, "
        f"{read / 1e6:,.1f} MB read"
    )
    print(f"host memory used: {record['peak_bytes']['cpu'] / 1e6:,.1f} of {limit / 1e6:,.1f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:4])
