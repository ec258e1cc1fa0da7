"""A first HELM score: run one scenario and read the metric that HELM wrote.

    python examples/first_score.py [MODEL]

MODEL is any name or folder that the engine can load; the default is a 135M model, a download of 93
MB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flexgen_helm.cli import main as flexgen_helm

SUITE = "first-score"


def main(model: str = "smollm2-135m-instruct-q4_1") -> None:
    # The same as on the command line: flexgen-helm run -r … -m 20 --suite first-score
    entry = f"simple_mcqa_scored:model=flexgen/{model}"
    code = flexgen_helm(["run", "-r", entry, "-m", "20", "--suite", SUITE])
    if code != 0:
        sys.exit(code)
    # HELM writes a folder per run; stats.json has every metric, flexgen_run.json the throughput.
    folder = Path("benchmark_output/runs", SUITE, f"simple_mcqa_scored:model=flexgen_{model}")
    stats = json.loads((folder / "stats.json").read_text())
    (accuracy,) = (
        stat["mean"] for stat in stats if stat["name"] == {"name": "exact_match", "split": "test"}
    )
    record = json.loads((folder / "flexgen_run.json").read_text())
    print(f"accuracy {accuracy:.3f} at {record['actual_throughput']:.0f} tokens/s")


if __name__ == "__main__":
    main(*sys.argv[1:2])
