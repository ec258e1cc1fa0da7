"""`flexgen-helm plan -c FILE`: how long a suite of run entries takes."""

from __future__ import annotations

import math
import shlex
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.cli.arguments import output_flags, seconds_left
from flexgen_helm.cli.console import output, print_command, print_json, print_rows, print_table
from flexgen_helm.cli.engine_flags import to_arguments
from flexgen_helm.cli.plan_problem import PlanOptions, problem_for
from flexgen_helm.cli.plan_text import print_stored_type, print_time, range_text
from flexgen_helm.errors import UsageError
from flexgen_helm.planner.suite_plan import ANSWER_FACTOR
from flexgen_helm.report.ratio_of_sums import margin_shown
from flexgen_helm.tiers import TIER_PLACES
from flexgen_helm.units import count, size, spelled_duration

if TYPE_CHECKING:
    from flexgen_helm.planner.suite_plan import ScenarioPlan, SuitePlan

# So many as HELM's leaderboards take.
_MOST_INSTANCES = 1000
# Time of the sample that is printed without --until and --hours.
_NIGHT_S = 8 * 3600.0
# Share of the answers whose score differs between two precisions or models, as far as the smallest
# margin that a sample can prove depends on it.
FLIPS = 0.05
# Name of the suite in the commands that are printed.
_SUITE = "planned"


@dataclass(frozen=True)
class SuiteOptions:
    """The run entries to plan, and where HELM's prompts of them are.

    most_instances: of each entry; None for as many as the prompts were made for.
    output_path: folder that has `runs`.
    suite: with the prompts; None where none was given.
    """

    conf_paths: Sequence[Path]
    run_entries: Sequence[str]
    most_instances: int | None
    output_path: Path
    suite: str | None

    def read_entries(self) -> list[str]:
        """Return the run entries of the files and of -r, each once and without its model.

        Raises `UsageError` for a file that cannot be read or has no entries, and for an entry that
        HELM could not run.
        """
        from flexgen_helm.run_entries import check_entries, conf_file, read_conf, without_model

        run_entries = list(self.run_entries)
        for path in self.conf_paths:
            try:
                entries_of_file = read_conf(conf_file(path))
            except (OSError, ValueError) as error:
                raise UsageError(f"-c {path} cannot be read: {error}") from error
            if not entries_of_file:
                raise UsageError(f"-c {path} has no run entries; `flexgen-helm entries` lists some")
            run_entries += entries_of_file
        entries = list(dict.fromkeys(map(without_model, run_entries)))
        check_entries(entries, ["planned"], needs_weights=False)
        return entries

    def prompts(self, entries: Sequence[str], remedy: str) -> dict[str, Path]:
        """Return the file with HELM's prompts of each entry. Raises `UsageError`, with the remedy,
        where there is none.
        """
        from flexgen_helm.cli.suite_workload import find_prompts, prompt_files

        if self.suite is None:
            raise UsageError(f"a suite's plan counts the requests that HELM has made; {remedy}")
        folder, files = self.output_path / "runs" / self.suite, {}
        files_of_suite = prompt_files(folder, remedy)
        for entry in entries:
            if (file := find_prompts(entry, files_of_suite)) is None:
                raise UsageError(f"the suite in {folder} has no prompts of {entry!r}; {remedy}")
            files[entry] = file
        return files

    def how_to_make_prompts(self, helm_name: str | None) -> str:
        """Say how to make the prompts; helm_name: of the model of -r entries that name none."""
        suite = self.suite or _SUITE
        words = ["flexgen-helm", "run", "--dry-run"]
        words += ["-c", *map(str, self.conf_paths)] if self.conf_paths else []
        named = [_with_model(entry, helm_name) for entry in self.run_entries]
        words += ["-r", *named] if named else []
        words += ["-m", str(self.most_instances or _MOST_INSTANCES), "--suite", suite]
        words += output_flags(self.output_path)
        return f"make its prompts with `{shlex.join(words)}`, then plan with --suite {suite}"


def _with_model(entry: str, helm_name: str | None) -> str:
    scenario, _, rest = entry.partition(":")
    if helm_name is None or "model=" in rest:
        return entry
    return f"{scenario}:model={helm_name}{',' if rest else ''}{rest}"


def print_suite(
    asked: PlanOptions, suite: SuiteOptions, until: str | None, hours: float | None
) -> None:
    """Search the plan of run entries and print it; until, hours: of a run of a random sample.

    Raises `UsageError` where HELM has made no prompts of an entry.
    """
    from flexgen_helm.cli.suite_workload import WorkloadReader
    from flexgen_helm.planner.suite_plan import plan_suite
    from flexgen_helm.report.run_folder import asked_instances

    entries, remedy = suite.read_entries(), suite.how_to_make_prompts(asked.helm_name)
    files = suite.prompts(entries, remedy)
    made_for = max(asked_instances(file.parent) for file in files.values())
    most_instances = suite.most_instances or made_for or _MOST_INSTANCES
    problem = problem_for(asked)
    device = "cpu" if problem.compute_tier == "cpu" else "cuda"
    reader = WorkloadReader(problem.config, device, problem.precision.cache)
    workloads = [
        reader.workload(entry, file, most_instances, remedy) for entry, file in files.items()
    ]
    planned = plan_suite(problem, workloads, asked.compares)
    left_s = seconds_left(until, hours)
    sample = _sample(planned, left_s or _NIGHT_S)
    flags = ["-m", str(most_instances), "--suite", _SUITE]
    flags += output_flags(suite.output_path)
    flags += to_arguments({**asked.engine, "precision": asked.precision})
    if left_s is not None:
        flags += ["--until", until] if until else ["--hours", f"{hours:g}"]
    commands: list[list[str]] = []
    if asked.stages == 1 and asked.helm_name is not None:
        is_one_run = planned.is_one_run or left_s is not None
        commands = _commands(planned, asked.helm_name, flags, is_one_run)
    if asked.as_json:
        content = {
            "model": asked.model,
            "hardware": problem.hardware.name,
            "precision": problem.precision.name,
            **planned.to_json(),
            "sample": sample,
            "commands": [*map(shlex.join, commands)],
        }
        print_json(content)
    else:
        _print_plan(planned, asked.model, commands)
        _print_sample(sample, with_entries=left_s is not None)


def _print_sample(sample: Mapping[str, Any], with_entries: bool) -> None:
    shares = f"about {sample['share']:.1%} of the instances, at least {sample['least_share']:.1%}"
    output().print(
        f"A random sample, with --until or --hours, in {spelled_duration(sample['seconds'])}: "
        f"{shares}."
    )
    if not with_entries:
        return
    cells = [
        (row["entry"], str(row["instances"]), str(row["of"]), f"{100 * row['difference']:.1f} pp")
        for row in sample["entries"]
    ]
    titles = ["entry", "instances", "of", f"smallest margin it can prove, if {FLIPS:.0%} flip"]
    print_rows(titles, cells)


def _commands(
    planned: SuitePlan, helm_name: str, flags: Sequence[str], is_one_run: bool
) -> list[list[str]]:
    """Return the command of one run, or of each scenario, the longest first. The engine plans for
    the real lengths.
    """
    runs = sorted(planned.scenarios, key=lambda scenario: -scenario.alone.seconds)
    pieces = (
        [[entry for run in runs for entry in run.entries]]
        if is_one_run
        else [run.entries for run in runs]
    )
    commands = []
    for piece in pieces:
        entries = [_with_model(entry.entry, helm_name) for entry in piece]
        commands.append(["flexgen-helm", "run", "-r", *entries, *flags])
    return commands


def _sample(planned: SuitePlan, left_s: float) -> dict[str, Any]:
    """Return the share of the instances that one run computes in `left_s` seconds, and how many
    instances of each entry that are; keys as of `plan --json`.
    """

    def share(factor: float, most_s: float) -> float:
        """Return the share, in thousandths, with answers that are `factor` times as long."""
        thousandths = range(1, 1001)
        return (
            bisect_right(thousandths, most_s, key=lambda n: planned.sample_s(n / 1000, factor))
            / 1000
        )

    expected, least = share(1.0, left_s), share(ANSWER_FACTOR, left_s / planned.plan.range.high)
    entries = [
        {
            "entry": entry.entry,
            "instances": number,
            "of": entry.instances,
            "difference": margin_shown(number, FLIPS),
        }
        for entry in planned.entries
        if (number := math.ceil(expected * entry.instances))
    ]
    return {"seconds": left_s, "share": expected, "least_share": least, "entries": entries}


def _print_plan(planned: SuitePlan, model: str, commands: Sequence[Sequence[str]]) -> None:
    plan, total, console = planned.plan, planned.expected, output()
    entries = planned.entries
    number = f"{len(entries):,} run {'entry' if len(entries) == 1 else 'entries'}"
    print_time(total, number, plan.problem.precision.name, planned.by_precision)
    sequences = count(plan.problem.workload.num_sequences, "sequence")
    console.print(f"{model} on {plan.problem.hardware.name}: {sequences}")
    print_stored_type(model, plan.problem)
    way, slower = "As one run", ""
    if not planned.is_one_run:
        way = "A run for each scenario, one after another"
        alone = spelled_duration(planned.as_one.seconds)
        slower = (
            f" One run of all would take {alone}: its longest sequences leave room for fewer at "
            "once."
        )
    console.print(
        f"{way}: {spelled_duration(total.seconds)}. The range: {plan.range.source}.{slower}"
    )
    if planned.by_precision:
        print_table([_precision_row(*item) for item in planned.by_precision.items()])
    rows = [_scenario_row(scenario, planned) for scenario in planned.scenarios]
    print_table(rows, optional=("policy", "shared", "prompt", "sequences", "entries"))
    limits = [f"{size(plan.problem.limits[tier])} {where}" for tier, where in TIER_PLACES.items()]
    console.print(
        f"Allowed: {', '.join(limits if plan.problem.compute_tier == 'gpu' else limits[1:])}."
    )
    console.print(
        f"Answers are assumed as long as the references (range: {1 / ANSWER_FACTOR:g} to "
        f"{ANSWER_FACTOR:g} times). If all run to their limit: {spelled_duration(planned.limit_s)}."
    )
    if planned.is_one_run:
        console.print(plan.why)
    else:
        longest = max(planned.scenarios, key=lambda scenario: scenario.alone.seconds)
        console.print(f"{longest.entries[0].scenario}, which takes longest: {longest.plan.why}")
    if commands:
        console.print(f"To run it{', the longest first' * (len(commands) > 1)}:")
    for command in commands:
        print_command(command)


def _precision_row(name: str, found: SuitePlan | None) -> dict[str, str]:
    """Return what a precision takes."""
    if found is None:
        return {"precision": name, "takes": "no plan"}
    return {
        "precision": name,
        "weights": size(found.plan.problem.stored_bytes),
        "runs": "1" if found.is_one_run else str(len(found.scenarios)),
        "takes": spelled_duration(found.expected.seconds),
        "expect": range_text(found.expected),
    }


def _scenario_row(scenario: ScenarioPlan, planned: SuitePlan) -> dict[str, str]:
    expected = scenario.expected
    answer, limit = expected.mean_output, scenario.limit.mean_output
    return {
        "scenario": scenario.entries[0].scenario,
        "entries": str(len(scenario.entries)),
        "sequences": f"{expected.num_sequences:,}",
        "prompt": f"{expected.mean_prompt:,.0f}",
        "shared": f"{expected.mean_prompt - expected.mean_computed:,.0f}",
        "answer": f"{answer:,.0f}"
        if round(answer) == round(limit)
        else f"{answer:,.0f} of {limit:,.0f}",
        "alone": spelled_duration(scenario.alone.seconds),
        "expect": range_text(scenario.alone),
        "policy": str((planned if planned.is_one_run else scenario).plan.solution.policy),
    }
