"""`flexgen-helm plan` and `profile`: the policy for a model on a machine, what it costs, and
why.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.cli.arguments import (
    DEFAULT_OUTPUT,
    Hours,
    JsonFlag,
    ModelName,
    OutFile,
    OutputPath,
    UntilTime,
)
from flexgen_helm.cli.completion import complete_hardware, complete_model
from flexgen_helm.cli.console import (
    output,
    print_command,
    print_json,
    print_rows,
    print_table,
    stop_costs,
    write_json,
)
from flexgen_helm.cli.engine_flags import to_arguments
from flexgen_helm.cli.plan_problem import PlanOptions, problem_for
from flexgen_helm.cli.plan_text import print_stored_type, print_time, range_text
from flexgen_helm.config import EngineConfig, EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.planner.schedules import AUTOMATIC
from flexgen_helm.units import count, rate_text, size, spelled_duration

if TYPE_CHECKING:
    from flexgen_helm.planner.plan import Plan
    from flexgen_helm.tiers import Kind, Tier


_TIER_NAMES: Mapping[Tier, str] = {"gpu": "GPU", "cpu": "CPU", "disk": "disk"}
_KIND_NAMES: Mapping[Kind, str] = {
    "weights": "weights",
    "cache": "KV cache",
    "activations": "hidden states",
}
# Shares that are placed further from the policy's than this are mentioned.
_NOTABLE_SHARE = 0.02
# An entry that HELM needs no download for; users put their own in its place.
_EXAMPLE_ENTRY = "simple_mcqa:model="


_Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Name of the catalog, org--repo of the Hugging Face hub, or folder. Only its sizes "
        "are needed.",
        autocompletion=complete_model,
    ),
]
_Hardware = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Machine to plan for: measured (this one), the name of a shipped one such as t4 or "
        "h100, or a file that `flexgen-helm profile -o` wrote.",
        autocompletion=complete_hardware,
    ),
]
_PromptLen = Annotated[int | None, typer.Option(metavar="TOKENS", help="Tokens of each prompt.")]
_GenLen = Annotated[int | None, typer.Option(metavar="TOKENS", help="Tokens to generate for each.")]
_NumSeqs = Annotated[
    int | None,
    typer.Option(metavar="N", help="Number of prompts. Default: so many that every block is full."),
]
_Stages = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Equal machines that share the layers as a pipeline."),
]
_ConfPaths = Annotated[
    list[Path] | None,
    typer.Option(
        "--conf-paths",
        "-c",
        metavar="FILE",
        help="Instead of lengths: a file of run entries, as of run.",
    ),
]
_RunEntries = Annotated[
    list[str] | None,
    typer.Option("--run-entries", "-r", metavar="ENTRY", help="The same: one run entry."),
]
_Instances = Annotated[
    int | None,
    typer.Option(
        "--max-eval-instances",
        "-m",
        min=1,
        metavar="N",
        help="With -c: maximum instances of an entry. Default: that of the suite's prompts.",
    ),
]
_Suite = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="With -c: the suite whose prompts run --dry-run has made."),
]


def plan(
    engine: EngineOptions,
    named: ModelName = "",
    model: _Model = None,
    prompt_len: _PromptLen = None,
    gen_len: _GenLen = None,
    num_seqs: _NumSeqs = None,
    hardware: _Hardware = "measured",
    stages: _Stages = 1,
    conf_paths: _ConfPaths = None,
    run_entries: _RunEntries = None,
    max_eval_instances: _Instances = None,
    suite: _Suite = None,
    output_path: OutputPath = DEFAULT_OUTPUT,
    until: UntilTime = None,
    hours: Hours = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict how fast a model runs on a machine, and which policy makes it fastest.

    A policy says how many sequences are computed together, and what is placed on GPU, CPU, and
    disk. Without --policy the best one is searched; with it, that one is evaluated. With -c it says
    how long a suite of run entries takes.

    Example:
      flexgen-helm plan --model opt-30b --prompt-len 512 --gen-len 32 \\
        --num-seqs 500 --hardware t4

      flexgen-helm run --dry-run -c runs/helm_lite.conf -m 1000 --suite lite
      flexgen-helm plan -c runs/helm_lite.conf --suite lite \\
        --model llama-2-70b --hardware rtx3090 --cpu-memory 60GB
    """
    if named and model and named != model:
        raise UsageError(f"two models are named, {named} and --model {model}; leave one out")
    model = model or named or None
    has_lengths = any(value is not None for value in (prompt_len, gen_len, num_seqs))
    has_suite_options = any(
        value is not None for value in (max_eval_instances, suite, until, hours)
    )
    options = PlanOptions(engine, model or "", hardware, stages, as_json)
    if conf_paths or run_entries:
        from flexgen_helm.cli.plan_suite import SuiteOptions, print_suite

        _check_suite_flags(has_lengths, model is not None, engine)
        run_suite = SuiteOptions(
            conf_paths or (), run_entries or (), max_eval_instances, output_path, suite
        )
        return print_suite(options, run_suite, until, hours)
    if has_suite_options:
        raise UsageError(
            "-m, --suite, --until and --hours are for run entries; add -c FILE or -r ENTRY"
        )
    if model is None or prompt_len is None or gen_len is None:
        raise UsageError("plan needs --model with --prompt-len and --gen-len or with -c FILE")
    _plan_lengths(options, prompt_len, gen_len, num_seqs)


def _check_suite_flags(has_lengths: bool, has_model: bool, engine: EngineOptions) -> None:
    """Raise `UsageError` for flags that do not go with run entries."""
    if has_lengths:
        raise UsageError("run entries have their own lengths; leave out what is about lengths")
    if not has_model:
        raise UsageError("plan needs --model; the models that the run entries name are not read")
    for flag in ("policy", "schedule", "max_latency"):
        if flag in engine:
            raise UsageError(
                f"a plan of run entries is searched; leave --{flag.replace('_', '-')} out"
            )


def _plan_lengths(
    options: PlanOptions, prompt_len: int, gen_len: int, num_seqs: int | None
) -> None:
    """Plan sequences of equal lengths, and print the plan."""
    config = options.config
    _check_search(config, gen_len)
    problem = problem_for(options, prompt_len, gen_len, num_seqs)
    from flexgen_helm.hardware.profile import MEASURED
    from flexgen_helm.planner.plan import make_plan, search_precisions

    schedule, max_latency = config.fixed_schedule, config.max_latency
    planned = make_plan(
        problem, policy=config.fixed_policy, schedule=schedule, max_latency=max_latency
    )
    command = _run_command(options, planned)
    by_precision = search_precisions(planned, schedule, max_latency) if options.compares else {}
    if options.as_json:
        predicted = {
            name: plan and plan.to_json()["predicted"] for name, plan in by_precision.items()
        }
        print_json(
            {
                "model": options.model,
                "hardware": problem.hardware.name,
                **planned.to_json(),
                "precisions": predicted,
                "command": shlex.join(command) if command else None,
            }
        )
        return
    _print_speed(planned, options.model, by_precision)
    _print_placement(planned)
    _print_remarks(planned)
    if command is not None:
        hardware = problem.hardware.name
        machine = "" if hardware == MEASURED else f" on {hardware}"
        entries = "" if options.helm_name is None else ", with your own run entries"
        output().print(f"To run it{machine}{entries}:")
        print_command(command)


def _check_search(config: EngineConfig, gen_len: int) -> None:
    """Refuse options without effect before anything is measured."""
    schedule, has_policy = config.fixed_schedule, config.fixed_policy is not None
    if schedule is not None and schedule.is_single_pass and gen_len > 1:
        raise UsageError(
            f"--gen-len is {gen_len} and the schedule {schedule} draws one token; take --schedule "
            "zigzag"
        )
    if schedule not in (None, *AUTOMATIC) and gen_len == 1 and not has_policy:
        names = " and ".join(sorted(map(str, AUTOMATIC)))
        raise UsageError(f"a single token is searched for with {names}; leave --schedule out")


def _run_command(options: PlanOptions, planned: Plan) -> list[str] | None:
    """Return the words of the command that runs as planned; None where the plan does not fit, or
    for a pipeline.
    """
    problem, solution = planned.problem, planned.solution
    if problem.ranks > 1 or not solution.prediction.feasible:
        return None
    kept = {name: value for name, value in options.engine.items() if name != "max_latency"}
    policy = {"policy": str(solution.policy), "schedule": solution.schedule.name}
    flags = to_arguments({**kept, "precision": options.precision, **policy})
    if options.helm_name is None:
        command = ["batch", "IN.jsonl", "-o", "OUT.jsonl", "--model", options.model]
    else:
        instances = 100 if problem.endless else problem.workload.num_sequences
        command = ["run", "-r", f"{_EXAMPLE_ENTRY}{options.helm_name}", "-m", str(instances)]
    return ["flexgen-helm", *command, *flags]


def _print_speed(planned: Plan, model: str, by_precision: Mapping[str, Plan | None]) -> None:
    """Print how long the work takes, or why it does not fit.

    by_precision: plans to compare with.
    """
    problem, prediction, console = planned.problem, planned.solution.prediction, output()
    workload, precision = problem.workload, problem.precision.name
    number = "prompts" if problem.endless else count(workload.num_sequences, "prompt")
    if not prediction.feasible:
        console.print(planned.why, style="bold")
    elif problem.endless:  # blocks of other precisions are not of this size
        print_time(
            planned.expected, f"a block of {count(planned.block_sequences, 'sequence')}", precision
        )
    else:
        print_time(planned.expected, number, precision, by_precision)
    console.print(
        f"{model} on {problem.hardware.name}: {number} of {workload.mean_prompt:,.0f} tokens, "
        f"{count(round(workload.mean_output), 'generated token')} each"
    )
    print_stored_type(model, problem)
    if prediction.feasible:
        speed = (
            f"{rate_text(prediction.tokens_per_s)} generated tokens/s, "
            f"{rate_text(planned.sequences_per_h)} sequences/h"
        )
        console.print(f"{speed}: {spelled_duration(prediction.latency_s)}")
        console.print(f"The range: {planned.range.source}.")
        if by_precision:
            print_table([_precision_row(*item) for item in by_precision.items()])


def _print_remarks(planned: Plan) -> None:
    """Print the batches, what bounds the speed, and what a stop costs."""
    from flexgen_helm.planner.affine import fraction_vector
    from flexgen_helm.planner.predict import placed_fractions

    problem, solution, console = planned.problem, planned.solution, output()
    policy, prediction = solution.policy, solution.prediction
    batches = (
        f"in batches of {policy.gpu_batch_size:,}"
        if policy.gpu_batch_size < planned.block_sequences
        else "as one batch"
    )
    batches += f", prompts in {prediction.passes} passes" if prediction.passes > 1 else ""
    console.print(
        f"Computed together: {count(planned.block_sequences, 'sequence')}, {batches}; "
        f"schedule {solution.schedule}."
    )
    exact = fraction_vector(policy, problem.compute_tier == "gpu")
    if abs(exact - placed_fractions(problem, policy)).max() > _NOTABLE_SHARE:
        console.print(
            "The shares differ from the policy's, because matrices and cache blocks are placed "
            "whole."
        )
    if prediction.feasible:
        console.print(planned.why)
        console.print(f"When it is interrupted: {stop_costs(planned.stop_s)}.")
        console.print(
            "Prompts that begin alike are not counted here: their common tokens are computed once."
        )


def _precision_row(name: str, planned: Plan | None) -> dict[str, str]:
    """Return what the work takes with a precision; where no number of prompts is given, what a
    block takes.
    """
    if planned is None:
        return {"precision": name, "tokens/s": "no plan"}
    prediction = planned.solution.prediction
    time_column = "a block takes" if planned.problem.endless else "takes"
    return {
        "precision": name,
        "weights": size(planned.problem.stored_bytes),
        "tokens/s": rate_text(prediction.tokens_per_s),
        "at once": f"{planned.block_sequences:,}",
        time_column: spelled_duration(prediction.latency_s),
        "expect": range_text(planned.expected),
    }


def _print_placement(planned: Plan) -> None:
    """Print shares and bytes by tier."""
    from flexgen_helm.planner.affine import fractions_by_kind
    from flexgen_helm.planner.predict import placed_fractions

    problem, memory = planned.problem, planned.solution.prediction.memory
    placement = fractions_by_kind(placed_fractions(problem, planned.solution.policy))
    columns = {"": [*_KIND_NAMES.values(), "memory needed", "memory allowed", "workspace besides"]}
    for tier, name in _TIER_NAMES.items():
        if tier == "gpu" and problem.hardware.gpu is None:
            continue
        used = memory[tier]
        shares = [f"{100 * placement[kind][tier]:.0f} %" for kind in _KIND_NAMES]
        columns[name] = [
            *shares,
            size(used.peak),
            size(used.limit),
            size(used.workspace) if used.workspace else "",
        ]
    print_rows([*columns], [*zip(*columns.values())])


def profile(
    out: OutFile = None,
    offload_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Measure the disk of this folder. Default: offload in FLEXGEN_HELM_HOME.",
        ),
    ] = None,
) -> None:
    """Measure this machine for `plan` and --policy auto. Close other programs first.

    Takes about 20 s. The bandwidths, rates, and capacities are printed as JSON and stored in
    FLEXGEN_HELM_HOME.
    """
    from flexgen_helm.engine.machine_profile import measured_profile

    measured = measured_profile(folder=offload_dir, fresh=True).to_json()
    print_json(measured)
    if out is not None:
        write_json(out, measured, "name another with --out")
