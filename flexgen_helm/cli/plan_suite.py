"""`flexgen-helm plan -c FILE`: how long a suite of run entries takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_helm.cli.console import output, print_csv, print_json, print_table
from flexgen_helm.cli.suite_lengths import ANSWER_FACTOR
from flexgen_helm.errors import UsageError
from flexgen_helm.units import count, size, spelled_duration

if TYPE_CHECKING:
    import pandas

    from flexgen_helm.planner.plan import Plan
    from flexgen_helm.planner.problem import PlanningProblem
    from flexgen_helm.planner.suite import EntryWorkload, Expectation, ScenarioPlan, SuitePlan

# As HELM's leaderboards take.
MOST_INSTANCES = 1000
_BASES = {
    "prompts": "real prompts",
    "measured": "measured once",
    "published": "published",
    "assumed": "assumed",
}


def read_run_entries(conf_paths: Sequence[Path], run_entries: Sequence[str]) -> list[str]:
    """Return the run entries of the files and of -r, each once and without its model.

    Raises `UsageError` for a file that cannot be read or has no entries, and for an entry that HELM could not run.
    """
    from flexgen_helm.cli.suite_lengths import without_model
    from flexgen_helm.run_entries import check_entries, conf_file, read_conf

    given = list(run_entries)
    for path in conf_paths:
        try:
            found = read_conf(conf_file(path))
        except (OSError, ValueError) as error:
            raise UsageError(f"-c {path} cannot be read: {error}") from error
        if not found:
            raise UsageError(f"-c {path} has no run entries; `flexgen-helm entries` lists some")
        given += found
    entries = list(dict.fromkeys(map(without_model, given)))
    check_entries(entries, ["planned"], needs_weights=False)
    return entries


def entry_workloads(
    entries: Sequence[str], problem: PlanningProblem, most_instances: int, suite: Path | None
) -> list[EntryWorkload]:
    """Return what each entry asks: of the prompts in the suite's folder where it has them, else of the stated table.

    Raises `UsageError` for an entry that neither has.
    """
    from flexgen_helm.cli.suite_lengths import PromptReader, made_prompts, prompts_of, stated_workload

    made = {} if suite is None else made_prompts(suite)
    device = "cpu" if problem.compute_tier == "cpu" else "cuda"
    reader = PromptReader(problem.config, device, problem.precision.cache) if made else None
    workloads = []
    for entry in entries:
        file = prompts_of(entry, made)
        if reader is not None and file is not None:
            workloads.append(reader.workload(entry, file))
        else:
            workloads.append(stated_workload(entry, most_instances, problem.config))
    return workloads


def print_suite(
    entries: Sequence[EntryWorkload], problem: PlanningProblem, model: str, compare: bool, as_json: bool, as_csv: bool
) -> None:
    """Search the plan of a suite and print it; compare: with other precisions."""
    from flexgen_helm.planner.suite import plan_suite

    planned = plan_suite(problem, entries, compare and not as_csv)
    if as_json:
        named = {"model": model, "hardware": problem.hardware.name, "precision": problem.precision.name}
        print_json({**named, **planned.to_json()})
    elif as_csv:
        import pandas

        rows = pandas.DataFrame(planned.to_json()["scenarios"])
        rows["entries"] = [" ".join(entry["entry"] for entry in entries) for entries in rows["entries"]]
        rows[["low_s", "high_s"]] = rows.pop("range").tolist()
        print_csv(rows)
    else:
        _print(planned, model)


def _print(planned: SuitePlan, model: str) -> None:
    made, total, console = planned.made, planned.total, output()
    entries = [entry for scenario in planned.scenarios for entry in scenario.entries]
    number = f"{len(entries):,} run {'entry' if len(entries) == 1 else 'entries'}"
    console.print(
        f"{model} ({made.problem.precision.name}) on {made.problem.hardware.name}: {number}, "
        f"{count(made.problem.workload.num_sequences, 'sequence')}"
    )
    console.print(f"As one run: {spelled_duration(total.seconds)}. Expect {_range(total)}: {made.spread.source}.")
    if planned.by_precision:
        print_table(_precisions_table(planned))
    print_table(_table(planned))
    console.print(
        f"Answers count as long as the right ones; the range has {1 / ANSWER_FACTOR:g} to {ANSWER_FACTOR:g} times as "
        f"many tokens. If none ended before it must, the run would take {spelled_duration(planned.limit_s)}."
    )
    for basis, named in _BASES.items():
        sources: dict[str, list[str]] = {}
        for entry in entries:
            if entry.basis == basis:
                sources.setdefault(entry.source, []).append(entry.scenario)
        for source, names in sources.items():
            console.print(f"{named.capitalize()}, {', '.join(dict.fromkeys(names))}: {source}.")
    console.print(made.why)


def _precisions_table(planned: SuitePlan) -> pandas.DataFrame:
    """What the run takes with each precision."""
    import pandas

    def row(name: str, found: tuple[Plan, Expectation] | None) -> dict[str, str]:
        if found is None:
            return {"precision": name, "takes": "no plan"}
        made, expected = found
        return {
            "precision": name,
            "weights": size(made.problem.stored_bytes),
            "at once": f"{made.block_sequences:,}",
            "takes": spelled_duration(expected.seconds),
            "expect": _range(expected),
        }

    return pandas.DataFrame(row(*item) for item in planned.by_precision.items()).fillna("")


def _table(planned: SuitePlan) -> pandas.DataFrame:
    import pandas

    def row(scenario: ScenarioPlan) -> dict[str, str]:
        expected, answer, most = scenario.expected, scenario.expected.output, scenario.limit.output
        return {
            "scenario": scenario.entries[0].scenario,
            "entries": str(len(scenario.entries)),
            "sequences": f"{expected.num_sequences:,}",
            "prompt": f"{expected.prompt:,.0f}",
            "shared": f"{expected.prompt - expected.computed:,.0f}",
            "answer": f"{answer:,.0f}" if round(answer) == round(most) else f"{answer:,.0f} of {most:,.0f}",
            "alone": spelled_duration(scenario.alone.seconds),
            "expect": _range(scenario.alone),
            "lengths": ", ".join(dict.fromkeys(_BASES[entry.basis] for entry in scenario.entries)),
        }

    return pandas.DataFrame(map(row, planned.scenarios))


def _range(expected: Expectation) -> str:
    return f"{spelled_duration(expected.low)} to {spelled_duration(expected.high)}"
