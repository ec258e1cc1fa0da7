"""How far predictions were from measured runs, by where a machine's rates come from. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexgen_helm.hardware.profile import PROFILED, HardwareProfile, load_profile


@dataclass(frozen=True)
class MeasuredRange:
    """The range of measured times, as multiples of the predicted one, that holds at least 80 % of
    measured runs.

    source: where the rates come from, and what the range was measured on, for people.
    """

    low: float
    high: float
    source: str

    def of_time(self, seconds: float) -> tuple[float, float]:
        """Return the shortest and the longest time to expect."""
        return seconds * self.low, seconds * self.high

    def of_rate(self, rate: float) -> tuple[float, float]:
        """Return the lowest and the highest rate to expect."""
        return rate / self.high, rate / self.low


LEARNT = MeasuredRange(
    1 / 1.2,
    1.2,
    "rates measured and corrected by runs; all of ten such policies were within this range",
)
NEW = MeasuredRange(
    1 / 1.2,
    2.0,
    (
        "rates measured, not corrected by a run yet; such runs took 1.1 to 2 times as long as "
        "predicted"
    ),
)
FITTED = MeasuredRange(
    1 / 1.25, 1.25, "rates fitted to the paper's T4; 25 of its 28 rows are within this range"
)
DATA_SHEET = MeasuredRange(
    1 / 2,
    2.0,
    "speeds are from data sheets; 44 of 45 published runs fell within such a range",
)
PIPELINE = MeasuredRange(
    1 / 2, 2.0, "machines in a pipeline; all six rows of the paper's four T4s are within this range"
)


def measured_range(hardware: HardwareProfile, ranks: float = 1) -> MeasuredRange:
    """Return the range for a machine; a profile whose rates have no known source counts as a data
    sheet.
    """
    if ranks > 1:
        return PIPELINE
    if PROFILED in hardware.sources.values():
        is_corrected = (hardware.prefill_share, hardware.decode_share) != (1.0, 1.0)
        return LEARNT if is_corrected else NEW
    paper = load_profile("t4")
    is_fitted = (hardware.gpu, hardware.cpu, hardware.link) == (paper.gpu, paper.cpu, paper.link)
    return FITTED if is_fitted else DATA_SHEET


@dataclass(frozen=True)
class Expectation:
    """Seconds that a workload is predicted to take, and the range to expect."""

    seconds: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "range": [self.low, self.high]}
