"""Sentences that `flexgen-helm plan` prints of lengths and of suites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexgen_helm.cli.console import output
from flexgen_helm.units import rough_duration, size

if TYPE_CHECKING:
    from flexgen_helm.planner.measured_range import Expectation
    from flexgen_helm.planner.plan import Plan
    from flexgen_helm.planner.problem import PlanningProblem
    from flexgen_helm.planner.suite_plan import SuitePlan


def print_stored_type(model: str, problem: PlanningProblem) -> None:
    """Say what becomes of weights that are published in another type than 16 bits."""
    from flexgen_helm.checkpoint.planned_weights import quantized_by

    if not (method := quantized_by(model)):
        return
    counted = f"the plan counts {size(problem.stored_bytes)} in {problem.precision.name}"
    if not problem.precision.published.by_name:
        text = f"are stored as {method} and read as 16 bits; {counted}"
    elif problem.precision.weights is None:
        text = f"rest as published, in {method}; {counted}"
    else:
        text = f"are published in {method} and rounded a second time; {counted}"
    output().print(f"The weights {text}.")


def print_time(
    expected: Expectation,
    work: str,
    precision: str,
    plans: Mapping[str, Plan | SuitePlan | None] = {},
) -> None:
    """Print what matters most: how long the work takes; plans: of other precisions, too."""
    about = (
        f"About {rough_duration(expected.seconds)} ({range_text(expected)}) for {work} in "
        f"{precision}"
    )
    more = [
        f"{name}: {rough_duration(found.expected.seconds)}"
        for name, found in plans.items()
        if found and name != precision
    ]
    output().print("; ".join(filter(None, (about, ", ".join(more)))) + ".", style="bold")


def range_text(expected: Expectation) -> str:
    return f"{rough_duration(expected.low)} to {rough_duration(expected.high)}"
