"""`flexgen-helm plan` and `profile`: the policy for a model on a machine, what it costs, and
why.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.cli.console import (
    output,
    print_command,
    print_json,
    print_rows,
    print_table,
    write_json,
)
from flexgen_helm.cli.engine_flags import (
    DEFAULT_OUTPUT,
    Hours,
    JsonFlag,
    OutFile,
    OutputPath,
    UntilTime,
    complete_hardware,
    complete_model,
    to_arguments,
)
from flexgen_helm.cli.plan_problem import (
    PlanOptions,
    print_stored_type,
    print_time,
    problem_for,
    range_text,
)
from flexgen_helm.config import EngineConfig, EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.files import count, rate_text, size, spelled_duration
from flexgen_helm.planner.schedules import AUTOMATIC
from flexgen_helm.progress import KEEP_EVERY_S, KEEP_STATES_EVERY_S, stop_costs

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
# An entry that HELM needs no download for; the reader puts his own in its place.
_RUN_ENTRY = "simple_mcqa:model="


_Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help=(
            "Name of the catalog, org--repo of the Hugging Face hub, or folder. Only its sizes are "
            "needed."
        ),
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
_NumSeqs = Annotated[
    int | None,
    typer.Option(
        metavar="N", help=("Number of prompts. Default: so many that every block is full.")
    ),
]
_Stages = Annotated[
    int,
    typer.Option(min=1, metavar="N", help=("Equal machines that share the layers as a pipeline.")),
]
_ConfPaths = Annotated[
    list[Path] | None,
    typer.Option(
        "--conf-paths",
        "-c",
        metavar="FILE",
        help=("Instead of lengths: a file of run entries, as of run."),
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
    typer.Option(metavar="NAME", help=("With -c: the suite whose prompts run --dry-run has made.")),
]


def plan(
    engine: EngineOptions,
    model: _Model = None,
    prompt_len: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Tokens of each prompt.")
    ] = None,
    gen_len: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Tokens to generate for each.")
    ] = None,
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
    lengths, of_suite = (prompt_len, gen_len, num_seqs), (max_eval_instances, suite, until, hours)
    asked = PlanOptions(engine, model or "", hardware, stages, as_json)
    if conf_paths or run_entries:
        from flexgen_helm.cli.plan_suite import SuiteOptions, print_suite

        if any(value is not None for value in lengths):
            raise UsageError("run entries have their own lengths; leave out what is about lengths")
        if model is None:
            raise UsageError(
                "plan needs --model; the models that the run entries name are not read"
            )
        for flag in ("policy", "schedule", "max_latency"):
            if flag in engine:
                raise UsageError(
                    f"a plan of run entries is searched; leave --{flag.replace('_', '-')} out"
                )
        given = conf_paths or (), run_entries or (), max_eval_instances
        return print_suite(asked, SuiteOptions(*given, output_path, suite), until, hours)
    if any(value is not None for value in of_suite):
        raise UsageError(
            "-m, --suite, --until and --hours are for run entries; add -c FILE or -r ENTRY"
        )
    if model is None or prompt_len is None or gen_len is None:
        raise UsageError("plan needs --model with --prompt-len and --gen-len or with -c FILE")
    _plan_lengths(asked, prompt_len, gen_len, num_seqs)


def _plan_lengths(asked: PlanOptions, prompt_len: int, gen_len: int, num_seqs: int | None) -> None:
    """Plan sequences of equal lengths, and print what was found."""
    _check_search(asked.config, gen_len)
    problem = problem_for(asked, prompt_len, gen_len, num_seqs)
    from flexgen_helm.planner.plan import make_plan, search_precisions

    policy = asked.config.fixed_policy
    schedule = asked.config.fixed_schedule
    max_latency = asked.config.max_latency
    made = make_plan(problem, policy=policy, schedule=schedule, max_latency=max_latency)
    command = _run_command(asked, made)
    by_precision = search_precisions(made, schedule, max_latency) if asked.compares else {}
    if asked.as_json:
        print_json(
            {
                "model": asked.model,
                "hardware": problem.hardware.name,
                **made.to_json(),
                "precisions": {
                    name: found and found.to_json()["predicted"]
                    for name, found in by_precision.items()
                },
                "command": shlex.join(command) if command else None,
            }
        )
    else:
        _print_plan(made, asked.model, by_precision, command)


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


def _run_command(asked: PlanOptions, made: Plan) -> list[str] | None:
    """Return the words of the command that runs as planned; None where the plan does not fit, or
    for a pipeline.
    """
    if made.problem.ranks > 1 or not made.solution.prediction.feasible:
        return None
    kept = {name: value for name, value in asked.engine.items() if name != "max_latency"}
    planned = {"policy": str(made.solution.policy), "schedule": made.solution.schedule.name}
    flags = to_arguments({**kept, "precision": asked.precision, **planned})
    if asked.helm_name is None:
        return [
            "flexgen-helm",
            "batch",
            "IN.jsonl",
            "-o",
            "OUT.jsonl",
            "--model",
            asked.model,
            *flags,
        ]
    instances = 100 if made.problem.endless else made.problem.workload.num_sequences
    return [
        "flexgen-helm",
        "run",
        "-r",
        f"{_RUN_ENTRY}{asked.helm_name}",
        "-m",
        str(instances),
        *flags,
    ]


def _print_plan(
    made: Plan, model: str, by_precision: Mapping[str, Plan | None], command: list[str] | None
) -> None:
    from flexgen_helm.planner.predict import placed_fractions
    from flexgen_helm.planner.problem import MEASURED, fraction_vector

    problem, policy, prediction = made.problem, made.solution.policy, made.solution.prediction
    workload, console = problem.workload, output()
    number = "prompts" if problem.endless else count(workload.num_sequences, "prompt")
    together = count(made.block_sequences, "sequence")
    if not prediction.feasible:
        console.print(made.why, style="bold")
    elif problem.endless:  # blocks of other precisions are not of this size
        print_time(made.expected, f"a block of {together}", problem.precision.name)
    else:
        print_time(made.expected, number, problem.precision.name, by_precision)
    console.print(
        f"{model} on {problem.hardware.name}: {number} of {workload.prompt:,.0f} tokens, "
        f"{count(round(workload.output), 'generated token')} each"
    )
    print_stored_type(model, problem)
    if prediction.feasible:
        speed = (
            f"{rate_text(prediction.tokens_per_s)} generated tokens/s, "
            f"{rate_text(made.sequences_per_h)} sequences/h"
        )
        console.print(f"{speed}: {spelled_duration(prediction.latency_s)}")
        console.print(f"The range: {made.spread.source}.")
        if by_precision:
            print_table([_precision_row(*item) for item in by_precision.items()])
    _print_placement(made)
    batches = (
        f"in batches of {policy.gpu_batch_size:,}"
        if policy.gpu_batch_size < made.block_sequences
        else "as one batch"
    )
    batches += f", prompts in {prediction.passes} passes" if prediction.passes > 1 else ""
    console.print(f"Computed together: {together}, {batches}; schedule {made.solution.schedule}.")
    exact = fraction_vector(policy, problem.compute_tier == "gpu")
    if abs(exact - placed_fractions(problem, policy)).max() > _NOTABLE_SHARE:
        console.print(
            "The shares differ from the policy's, because matrices and cache blocks are placed "
            "whole."
        )
    if prediction.feasible:
        console.print(made.why)
        console.print(f"When it is interrupted: {stop_costs(_stop_s(made))}.")
        console.print(
            "Prompts that begin alike are not counted here: their common tokens are computed once."
        )
    if command is not None:
        machine = "" if problem.hardware.name == MEASURED else f" on {problem.hardware.name}"
        entries = ", with your own run entries" if command[1] == "run" else ""
        console.print(f"To run it{machine}{entries}:")
        print_command(command)


def _stop_s(made: Plan) -> float:
    """Return the most seconds that a stop costs: the prompts of a block with what was drawn, and a
    pass.

    Of a pass without decoding it is what was computed since its hidden states were kept, and a
    layer.
    """
    prediction, workload = made.solution.prediction, made.problem.workload
    decode_passes = max(1.0, workload.output - 1)
    again = prediction.prefill_s * (1 + max(0.0, workload.output - 1) / workload.prompt)
    if made.solution.schedule.is_single_pass:
        again = min(again, KEEP_STATES_EVERY_S + again / made.problem.config.num_layers)
    return KEEP_EVERY_S + again + prediction.decode_s / decode_passes


def _precision_row(name: str, made: Plan | None) -> dict[str, str]:
    """Return what the work takes with a precision; where no number of prompts is given, what a
    block takes.
    """
    if made is None:
        return {"precision": name, "tokens/s": "no plan"}
    prediction = made.solution.prediction
    return {
        "precision": name,
        "weights": size(made.problem.stored_bytes),
        "tokens/s": rate_text(prediction.tokens_per_s),
        "at once": f"{made.block_sequences:,}",
        "a block takes" if made.problem.endless else "takes": spelled_duration(
            prediction.latency_s
        ),
        "expect": range_text(made.expected),
    }


def _print_placement(made: Plan) -> None:
    """Print shares and bytes by tier."""
    from flexgen_helm.planner.predict import placed_fractions
    from flexgen_helm.planner.problem import fractions_by_kind

    problem, memory = made.problem, made.solution.prediction.memory
    placement = fractions_by_kind(placed_fractions(problem, made.solution.policy))
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
            help=("Measure the disk of this folder. Default: offload in FLEXGEN_HELM_HOME."),
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
