"""Benchmarks, installed as `flexgen_helm.benchmarks`: one module each, with `run(options) -> dict` in the format below.

    {name, date, hardware, versions, rows: [{label, …, median, min, max, n}], ratios, …}

`rows` are seconds unless a row's label says otherwise. `ratios` are above 1 where flexgen_helm is faster. `notes` are
the sentences that a reader needs with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import import_module
from statistics import median
from typing import Any

import psutil

from flexgen_helm.errors import UsageError

KNOWN = (
    "clients",
    "accuracy",
    "offload",
    "ablation",
    "policy",
    "kernels",
    "gpu",
    "paper",
)
UNTIMED = ("accuracy", "paper")
BUSY_LOAD = 0.5  # runnable processes


@dataclass(frozen=True)
class Options:
    """Options of `flexgen-helm bench`; None means the benchmark's own default.

    engine: keyword arguments of `EngineConfig` from the engine flags, only those given
    entry: HELM run entry, without a model
    instances: of the entry
    repeats: measurements of each side
    chat: `clients` puts prompts through the chat template
    tasks, peers: of `clients`; None for all
    earlier: result of `clients` to which this call adds
    quick: a smoke test, whose figures mean nothing
    python: one with lm-evaluation-harness, for `accuracy`
    reference: folder of the harness's results, for `accuracy`
    table: of `paper`
    measure: `paper` runs the benchmarks that measure its tables
    prompt_len, gen_len: other lengths for `paper`'s table of throughputs
    tell: called with a line of text at each step
    """

    engine: Mapping[str, Any] = field(default_factory=dict)
    entry: str | None = None
    instances: int | None = None
    repeats: int | None = None
    quick: bool = False
    chat: bool = False
    python: str | None = None
    reference: str | None = None
    table: str | None = None
    measure: bool = False
    prompt_len: int | None = None
    gen_len: int | None = None
    tasks: tuple[str, ...] | None = None
    peers: tuple[str, ...] | None = None
    earlier: Mapping[str, Any] | None = None
    tell: Callable[[str], None] = lambda line: None


def load(name: str) -> Callable[[Options], dict[str, Any]]:
    """Return the benchmark's `run`, which also dates the result, and notes whether other programs computed meanwhile.

    Raises `UsageError`, with the names of all, for another name.
    """
    if name not in KNOWN:
        raise UsageError(f"there is no benchmark {name!r}; known are {', '.join(KNOWN)}")
    module = import_module(f"{__name__}.{name}")

    def run(options: Options) -> dict[str, Any]:
        load = psutil.getloadavg()[0]
        result = {"date": date.today().isoformat(), **module.run(options)}
        if load > BUSY_LOAD and name not in UNTIMED:
            busy = f"other programs were computing when this began (load {load:.1f}): figures are noise"
            result["notes"] = [*result["notes"], busy]
        return result

    return run


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return {median, min, max, n} of one row."""
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}
