"""The scores of finished HELM runs, read from the files that HELM writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The first of these that a run has leads its row; further ones follow up to `SHOWN`.
MAIN_METRICS = (
    "exact_match", "quasi_exact_match", "prefix_exact_match", "exact_set_match", "f1_set_match", "iou_set_match",
    "f1_score", "rouge_l", "rouge_2", "final_number_exact_match", "math_equiv", "pass", "classification_macro_f1",
    "target_perplexity", "word_perplexity", "token_perplexity", "perplexity", "bits_per_byte", "logprob_per_byte",
)  # fmt: skip
# Both are also called `perplexity` for HELM's tables.
_PRECISE_NAMES = ("target_perplexity", "token_perplexity")
SHOWN = 3


@dataclass(frozen=True)
class RunScores:
    """One run. scores: metric -> mean over the instances of the evaluated split, without perturbations.
    run: the content of `flexgen_run.json`, empty where there is none."""

    name: str
    scores: dict[str, float]
    run: dict[str, Any]

    @property
    def num_reused(self) -> int:
        """Answers that an earlier run computed."""
        return int(self.run.get("num_reused", 0))

    @property
    def num_answers(self) -> int:
        """Equal requests have one."""
        workload = self.run.get("workload", {})
        return int(workload.get("num_unique", workload.get("num_requests", self.num_reused)))

    @property
    def rate(self) -> str:
        """Tokens a second, with a star where `reused_note` is about them."""
        return f"{self.run.get('actual_throughput', 0.0):,.0f}" + (" *" if self.num_reused else "")


def read_scores(folder: Path) -> RunScores:
    """Scores of the run in `folder`; raises OSError or ValueError where HELM has not finished writing it."""
    stats = json.loads((folder / "stats.json").read_text(encoding="utf-8"))
    found: dict[str, float] = {}
    for split in ("test", "valid"):
        for stat in stats:
            name = stat["name"]
            if name.get("split") == split and "perturbation" not in name and stat.get("count"):
                found.setdefault(name["name"], float(stat["mean"]))
    if any(name in found for name in _PRECISE_NAMES):
        found.pop("perplexity", None)
    main = [name for name in MAIN_METRICS if name in found][:SHOWN]
    record = folder / "flexgen_run.json"
    run = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    return RunScores(folder.name, {name: found[name] for name in main}, run)


def reused_note(runs: Iterable[RunScores]) -> str | None:
    """Where throughputs come from that this call did not measure, as a sentence without its stop; None if nowhere."""
    some = list(runs)
    reused = sum(run.num_reused for run in some)
    if not reused:
        return None
    return (
        f"{reused:,} of {sum(run.num_answers for run in some):,} answers come from earlier runs; tokens a second (*) "
        "are what those took then (--disable-cache measures anew)"
    )


def table(runs: Iterable[RunScores]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Column titles, and a row of strings for every run, in human units."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        workload = run.run.get("workload", {})
        rows.append(
            (
                run.name,
                "  ".join(f"{name} {score:.3f}" for name, score in run.scores.items()) or "-",
                f"{workload.get('num_requests', 0):,}",
                f"{workload.get('prompt_tokens', 0) + workload.get('output_tokens', 0):,}",
                run.rate,
                f"{100 * run.run.get('efficiency', 1.0):.1f} %",
            )
        )
    return ("run", "scores", "requests", "tokens", "tokens/s", "efficiency"), rows
