"""Benchmarks: one module each, with `run(options) -> dict` in the format below.

    {name, hardware, versions, rows: [{label, …, median, min, max, n}], ratios, …}

`rows` are seconds unless a row's label says otherwise; `ratios` are above 1 where we are faster; `notes` are the
sentences that a reader needs with them. A benchmark that is not in `KNOWN` does not exist for `flexgen-helm bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from statistics import median
from typing import Any

from flexgen_helm.errors import UsageError

KNOWN = ("clients", "accuracy", "offload", "ablation", "policy", "kernels", "formats")


def _silent(line: str) -> None:
    return


@dataclass(frozen=True)
class Options:
    """What `flexgen-helm bench` was told; None = the benchmark's own default.

    engine: client arguments from the engine flags, only those given. quick: a smoke test whose figures mean
    nothing. python: one with lm-evaluation-harness, and reference: a folder for its results, both for `accuracy`.
    tell: called with one line of text at each step.
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    entry: str | None = None
    instances: int | None = None
    repeats: int | None = None
    quick: bool = False
    python: str | None = None
    reference: str | None = None
    tell: Callable[[str], None] = _silent


def load(name: str) -> Callable[[Options], dict[str, Any]]:
    """The benchmark of that name; raises `UsageError` with the known ones."""
    if name not in KNOWN:
        raise UsageError(f"there is no benchmark {name!r}; known are {', '.join(KNOWN)}")
    run: Callable[[Options], dict[str, Any]] = import_module(f"{__name__}.{name}").run
    return run


def summary(values: Sequence[float]) -> dict[str, Any]:
    """{median, min, max, n} of one row."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}
