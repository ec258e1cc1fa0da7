"""Scores and throughput of finished HELM runs, read from the files in their folders."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.errors import UsageError

# Metrics in order of precedence; a run shows the first `MAX_SHOWN` that it has.
MAIN_METRICS = (
    "exact_match", "quasi_exact_match", "prefix_exact_match", "exact_set_match", "f1_set_match", "iou_set_match",
    "f1_score", "rouge_l", "rouge_2", "final_number_exact_match", "math_equiv", "pass", "classification_macro_f1",
    "target_perplexity", "word_perplexity", "token_perplexity", "perplexity", "bits_per_byte", "logprob_per_byte",
)  # fmt: skip
MAX_SHOWN = 3
# The scenarios report these as `perplexity` too, because HELM's tables know that name.
_PRECISE_PERPLEXITIES = ("target_perplexity", "token_perplexity")


@dataclass(frozen=True)
class RunScores:
    """Scores of one finished run.

    scores: metric -> mean over the instances of the evaluated split, without perturbations.
    run: content of `flexgen_run.json`; empty if the run has none.
    """

    name: str
    scores: dict[str, float]
    run: dict[str, Any]

    @property
    def workload(self) -> dict[str, float]:
        workload: dict[str, float] = self.run.get("workload", {})
        return workload

    @property
    def num_reused(self) -> int:
        """Number of answers that an earlier run computed."""
        return int(self.run.get("num_reused", 0))

    @property
    def num_answers(self) -> int:
        """Number of distinct requests; identical requests share an answer."""
        return int(self.workload.get("num_unique", self.workload.get("num_requests", self.num_reused)))


def read_scores(folder: Path) -> RunScores:
    """Read the run in `folder`; raises OSError or ValueError if HELM has not finished writing it."""
    stats = json.loads((folder / "stats.json").read_text(encoding="utf-8"))
    means: dict[str, float] = {}
    for split in ("test", "valid"):
        for stat in stats:
            name = stat["name"]
            if name.get("split") == split and "perturbation" not in name and stat.get("count"):
                means.setdefault(name["name"], float(stat["mean"]))
    if any(name in means for name in _PRECISE_PERPLEXITIES):
        means.pop("perplexity", None)
    shown = [name for name in MAIN_METRICS if name in means][:MAX_SHOWN]
    record = folder / "flexgen_run.json"
    run = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    return RunScores(folder.name, {name: means[name] for name in shown}, run)


def read_finished_runs(suite: Path) -> list[RunScores]:
    """Read the finished runs of flexgen models in the folder of a suite; raises `UsageError` if there is no folder."""
    if not suite.is_dir():
        raise UsageError(f"there is no suite in {suite}; run one first, or name another folder with -o")
    runs = []
    for folder in sorted(suite.iterdir()):
        with suppress(OSError, ValueError, KeyError):
            runs.append(read_scores(folder))
    return [run for run in runs if run.run]


def reused_note(runs: Iterable[RunScores]) -> str | None:
    """Return a note, without its full stop, on throughputs measured by earlier runs; None if there are none."""
    runs = list(runs)
    reused = sum(run.num_reused for run in runs)
    if not reused:
        return None
    return (
        f"{reused:,} of {sum(run.num_answers for run in runs):,} answers come from earlier runs; tokens/s marked * "
        "were measured then (--disable-cache measures again)"
    )
