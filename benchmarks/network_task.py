"""One rank of `bench network`: `python -m flexgen_helm.benchmarks.network_task FOLDER REPEATS` under torchrun.

Rank 0 writes `seconds.json`: the seconds of each run, by the number of new tokens.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from flexgen_helm.benchmarks.network import MEASURED_OUTPUTS, MEASURED_PROMPT, MEASURED_REQUESTS
from flexgen_helm.engine.engine import Engine
from flexgen_helm.engine.follower import follow
from flexgen_helm.engine.pipeline import joined_pipeline, leave_pipeline
from flexgen_helm.request import GenerationRequest


def answer(folder: Path, repeats: int) -> None:
    seconds: dict[int, list[float]] = {output: [] for output in MEASURED_OUTPUTS}
    with Engine.from_pretrained(folder, device="cpu") as engine:
        for repeat in range(repeats + 1):
            for output in MEASURED_OUTPUTS:
                requests = [
                    GenerationRequest(
                        prompt_token_ids=[1 + (7 * i + 13 * j) % 300 for j in range(MEASURED_PROMPT)],
                        max_tokens=output,
                        ignore_eos=True,
                    )
                    for i in range(MEASURED_REQUESTS)
                ]
                began = time.perf_counter()
                engine.run(requests)
                if repeat:  # the first one connects and allocates
                    seconds[output].append(time.perf_counter() - began)
    (folder / "seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    pipeline = joined_pipeline()
    assert pipeline is not None
    if pipeline.is_first:
        answer(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        follow()
    leave_pipeline()
