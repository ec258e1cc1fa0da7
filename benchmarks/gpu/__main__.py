"""`python -m flexgen_helm.benchmarks.gpu`, which `make gpu-check` runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from flexgen_helm.benchmarks.gpu.session import GROUPS, STEPS, run_steps

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make gpu-check")
    parser.add_argument("steps", nargs="+", choices=[*GROUPS, *STEPS], help="STEPS")
    parser.add_argument("--limit", type=float, required=True, help="LIMIT: seconds of all steps")
    parser.add_argument("--out", type=Path, required=True, help="OUT: folder for the results")
    parser.add_argument("--fake", action="store_true", help="FAKE: on the tests' CUDA device")
    given = parser.parse_args()
    names = [step for name in given.steps for step in GROUPS.get(name, (name,))]
    result = run_steps(names, given.limit, given.out, given.fake)
    sys.exit(1 if result["failed"] else 0)
