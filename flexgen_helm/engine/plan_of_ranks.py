"""Make one plan for all ranks of a pipeline, whose passes must be the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flexgen_helm.engine.exchange import Exchange
from flexgen_helm.errors import FlexgenError
from flexgen_helm.planner.policy import ZIGZAG, Schedule
from flexgen_helm.planner.run_plan import RunPlan
from flexgen_helm.scheduling.lanes import common_limits


def plan_for_all_ranks(exchange: Exchange, plan: Callable[[Schedule | None], RunPlan]) -> RunPlan:
    """Return this rank's plan within limits that suit all ranks; one that cannot plan ends the run on all.

    plan: makes this rank's own, by a schedule that must be followed if one is given.
    """
    own, plans = _exchanged(exchange, plan, None)
    if len({other.schedule.is_single_pass for other in plans}) > 1:
        own, plans = _exchanged(exchange, plan, ZIGZAG)  # all can follow that
    return replace(own, limits=common_limits([other.limits for other in plans]))


def _exchanged(
    exchange: Exchange, plan: Callable[[Schedule | None], RunPlan], schedule: Schedule | None
) -> tuple[RunPlan, list[RunPlan]]:
    try:
        own = plan(schedule)
    except FlexgenError as error:
        exchange.agree(error)
        raise
    return own, exchange.agree(own)
