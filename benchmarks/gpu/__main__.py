"""`python -m flexgen_helm.benchmarks.gpu`, which `make gpu-check` runs: steps by name, under a limit of seconds."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from flexgen_helm.benchmarks.gpu.session import GROUPS, STEPS, Session, named_steps
from flexgen_helm.errors import UsageError


def main() -> None:
    """Write results.jsonl, table.txt, log.txt and the result; the exit code is 1 if a step did not pass."""
    parser = argparse.ArgumentParser(prog="make gpu-check")
    parser.add_argument("steps", nargs="*", default=["call1"], help=f"STEPS: {', '.join([*GROUPS, *STEPS])}")
    parser.add_argument("--limit", type=float, default=290, help="LIMIT: seconds of all steps")
    parser.add_argument("--out", type=Path, required=True, help="OUT: folder for the results")
    parser.add_argument("--fake", action="store_true", help="FAKE: the tests' CUDA device in host memory")
    given = parser.parse_args()
    try:
        steps = named_steps(given.steps)
    except UsageError as error:
        sys.exit(str(error))
    result = Session(given.limit, given.out, lambda line: print(line, flush=True), given.fake).run(steps)
    device = re.sub(r"[^a-z0-9]+", "_", result["hardware"]["device"].lower()).strip("_")
    (given.out / f"gpu_{device}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
