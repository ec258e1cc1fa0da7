"""Tokens per second of runs, and of all runs of a precision, or model, together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flexgen_helm.report.scores import RunScores, grouped


@dataclass(frozen=True)
class TotalSpeed:
    """What the runs of a label took together.

    label: precision, or model where models are compared.
    tokens: asked for: prompts and outputs.
    num_reused: answers that earlier runs computed.
    """

    label: str
    instances: int
    tokens: float
    latency_s: float
    num_reused: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.latency_s if self.latency_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {"precision": fields.pop("label"), **fields, "tokens_per_s": self.tokens_per_s}


def total_speed(label: str, runs: Sequence[RunScores]) -> TotalSpeed:
    """Add up runs."""
    return TotalSpeed(
        label,
        sum(run.num_scored for run in runs),
        sum(run.num_tokens for run in runs),
        sum(run.latency_s for run in runs),
        sum(run.num_reused for run in runs),
    )


def total_speeds(runs: Iterable[RunScores]) -> list[TotalSpeed]:
    """Add up the runs of each label."""
    by_label = grouped(runs, lambda run: run.label)
    return [total_speed(label, group) for label, group in by_label.items()]
