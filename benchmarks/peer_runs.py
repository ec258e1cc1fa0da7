"""Peers of `bench clients` that answer HELM's requests without HELM: what one run gives, and the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from flexgen_helm.benchmarks import summary
from flexgen_helm.benchmarks.helm_runs import HelmRun
from flexgen_helm.report.throughput import versions


@dataclass(frozen=True)
class PeerRun:
    """seconds: of the whole process. ready_s: until the model was loaded. texts: completions, in order."""

    seconds: float
    ready_s: float
    texts: Sequence[str]
    flags: Sequence[str] = ()


@dataclass(frozen=True)
class Peer:
    """A program without HELM.

    key: of its ratios. program: what people call it. version: of the package or program, by name.
    """

    key: str
    program: str
    version: Mapping[str, str]


def compare(
    peer: Peer, task: str, ours: HelmRun, our_row: Mapping[str, Any], runs: Mapping[str, Sequence[PeerRun]]
) -> dict[str, Any]:
    """Return rows, ratios, equal completions, versions and notes of a comparison with the peer at its best.

    Its seconds are those of the program alone: HELM's own start-up and metrics, which ours have, are not in them.
    ours: our typical run. our_row: of the result. runs: by the setting that they differ in, for people.
    """
    rows = {
        setting: {
            "label": f"{task}: {peer.program}, {setting}",
            **summary([run.seconds for run in own]),
            "ready_s": median(run.ready_s for run in own),
            "seconds": [run.seconds for run in own],
            "flags": list(own[-1].flags),
        }
        for setting, own in runs.items()
    }
    best = min(rows, key=lambda setting: float(rows[setting]["median"]))
    after = median(run.seconds - run.ready_s for run in runs[best])
    equal = sum(a == b for a, b in zip(ours.texts, runs[best][-1].texts, strict=True))
    return {
        "rows": list(rows.values()),
        "ratios": {
            f"against_{peer.key}": rows[best]["median"] / our_row["median"],
            f"against_{peer.key}_after_start_up": after / (ours.seconds - ours.ready_s),
        },
        "scores": {"equal_completions": equal, "completions": len(ours.texts)},
        "versions": {**versions(), **peer.version},
        "notes": [
            f"{our_row['label']} against {peer.program} with {best}, which runs without HELM; "
            f"{equal} of {len(ours.texts)} completions equal"
        ],
    }
