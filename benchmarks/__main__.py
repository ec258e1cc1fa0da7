"""`python -m flexgen_helm.benchmarks`: run a benchmark without HELM and the libraries of the command line.

A GPU machine may have torch alone. `make gpu-check` lays the package out as an installation would and runs this.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks import KNOWN, Options, load


def main() -> None:
    """Print the result's table, and write the JSON to a file that is named by benchmark and hardware."""
    parser = argparse.ArgumentParser(prog="python -m flexgen_helm.benchmarks")
    parser.add_argument("name", choices=KNOWN)
    parser.add_argument("--quick", action="store_true", help="only try it out; the figures mean nothing")
    parser.add_argument("--device", help="cuda, cuda:1 or sim")
    parser.add_argument("--results", type=Path, help="folder for the JSON")
    given = parser.parse_args()
    engine = {} if given.device is None else {"device": given.device}
    result = load(given.name)(Options(engine, quick=given.quick, tell=lambda line: print(line, flush=True)))
    for row in result["rows"]:
        print(row_text(row))
    for key, value in result["ratios"].items():
        print(f"{key.replace('_', ' ')}: {value:.2f}x")
    for note in result["notes"]:
        print(note)
    if given.results is not None:
        device = re.sub(r"[^a-z0-9]+", "_", str(result["hardware"].get("device", "cpu")).lower()).strip("_")
        path = given.results / f"{result['name']}_{device}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(path)


def row_text(row: Mapping[str, Any]) -> str:
    """Return a row as a line: its median, or what other figures it has."""
    if "median" in row:
        speed = f"  {row['tokens_per_s']:.1f} tokens/s" if "tokens_per_s" in row else ""
        return f"{row['label']:60} {row['median']:12.4g}{speed}"
    others = {name: value for name, value in row.items() if name not in ("label", "table") and value is not None}
    figures = (
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in others.items()
    )
    return f"{row['label']:60} {', '.join(figures)}"


if __name__ == "__main__":
    main()
