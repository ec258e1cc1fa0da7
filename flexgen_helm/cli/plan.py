"""`flexgen-helm plan`: the policy for a model on a machine, what it costs, and why."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexgen_helm.cli.console import print_json, say, writing
from flexgen_helm.cli.engine_options import EngineOptions
from flexgen_helm.errors import UsageError

if TYPE_CHECKING:
    from flexgen_helm.hardware.profile import HardwareProfile
    from flexgen_helm.planner.plan import Plan
    from flexgen_helm.planner.problem import PlanningProblem

# Points of a frontier, between the quickest block and the best one.
_POINTS = 12


def plan(
    engine: EngineOptions,
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="Catalogue name, org--repo of the hub or a folder.")
    ] = None,
    prompt_len: Annotated[int | None, typer.Option(metavar="S", help="Tokens of a prompt.")] = None,
    gen_len: Annotated[int | None, typer.Option(metavar="N", help="Tokens to generate for each.")] = None,
    num_seqs: Annotated[
        int | None, typer.Option(metavar="Q", help="Sequences in all; default: as many as keep blocks full.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A shipped machine, measured, or a file of `profile`.")
    ] = "measured",
    compress: Annotated[bool, typer.Option("--compress", help="Weights and cache in 4 bits.")] = False,
    stages: Annotated[int, typer.Option(min=1, help="Machines of a pipeline, each one like this.")] = 1,
    frontier: Annotated[bool, typer.Option("--frontier", help="Throughput under limits of latency.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="With --frontier: also as a picture.")
    ] = None,
    from_csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Evaluate each row of a table of throughputs instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search the best policy, or evaluate the one given with --policy."""
    if from_csv is not None:
        from flexgen_helm.planner.published import evaluate_csv

        _check_alone(engine, model, prompt_len, gen_len, num_seqs, compress, stages > 1, frontier, picture)
        found = evaluate_csv(from_csv, _profile(engine, hardware))
        print_json(found) if as_json else _print_table(found)
        return
    if model is None or prompt_len is None or gen_len is None:
        raise UsageError("plan needs --model, --prompt-len and --gen-len, or --from-csv FILE")
    _check_search(engine, gen_len, frontier, picture)
    situation, precision = _situation(engine, model, prompt_len, gen_len, num_seqs, hardware, compress, stages)
    if frontier:
        _frontier(situation, precision, picture, as_json)
        return
    made = _make(engine, situation, precision)
    if as_json:
        print_json({"model": model, "hardware": situation.hardware.name, **made.to_json()})
    else:
        _print_plan(made, model)


def _check_alone(engine: EngineOptions, *others: Any) -> None:
    """Refuse what the rows of a table say themselves."""
    given = [field.name for field in fields(engine) if getattr(engine, field.name) != field.default]
    if given not in ([], ["offload_dir"]) or any(others):
        raise UsageError(
            "--from-csv says for each row what to evaluate; leave everything out but --hardware and --json"
        )


def _check_search(engine: EngineOptions, gen_len: int, frontier: bool, picture: Path | None) -> None:
    """Refuse what would have no effect, before anything is measured."""
    from flexgen_helm.planner.policy import parse_choices

    schedule, latency = engine.schedule or "auto", engine.max_latency
    given = parse_choices(engine.policy or "auto", schedule, latency)[0] is not None
    if schedule == "prefill-only" and gen_len > 1:
        raise UsageError(
            f"--gen-len is {gen_len} and the schedule prefill-only draws one token; take --schedule zigzag"
        )
    if schedule not in ("auto", "prefill-only") and gen_len == 1 and not given:
        raise UsageError("a single token is searched for with prefill-only; leave --schedule out")
    if picture is not None and not frontier:
        raise UsageError(f"--picture {picture} is for a frontier; add --frontier")
    if not frontier:
        return
    for flag, value in (
        ("--policy", given),
        ("--max-latency", latency is not None),
        ("--schedule", schedule != "auto"),
    ):
        if value:
            raise UsageError(f"--frontier searches under limits of its own; leave {flag} out")
    if picture is not None and not picture.parent.is_dir():
        raise UsageError(f"--picture {picture}: there is no folder {picture.parent}")


def _precision(asked: str | None, suffix: str, compress: bool) -> str:
    """The precision of the flags, or of the model's name; --compress packs what is not packed yet."""
    from flexgen_helm.planner.plan import precision_named

    name = asked or suffix
    if not compress or precision_named(name).weights is not None:
        return precision_named(name).name
    if asked is not None:
        raise UsageError(f"--compress is 4 bits and --precision {asked} is not; leave one of them out")
    return name.replace("fp16", "4bit")


def _situation(
    engine: EngineOptions,
    model: str,
    prompt_len: int,
    gen_len: int,
    num_seqs: int | None,
    hardware: str,
    compress: bool,
    stages: int,
) -> tuple[PlanningProblem, str]:
    from dataclasses import replace

    from flexgen_helm.checkpoint.model_config import read_model_config
    from flexgen_helm.checkpoint.names import resolve
    from flexgen_helm.planner.plan import check_device, planning_problem, simulated_gpu
    from flexgen_helm.planner.problem import MEASURED
    from flexgen_helm.planner.workload import Workload

    for name, value in (("--prompt-len", prompt_len), ("--gen-len", gen_len), ("--num-seqs", num_seqs)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value} is no length; it must be 1 or more")
    arguments = engine.engine_arguments()
    resolved = resolve(model)
    precision = _precision(arguments.get("precision"), resolved.precision, compress)
    limits, device, link = engine.limits(), arguments.get("device", "auto"), arguments.get("link_gb_s")
    check_device(device, link, limits)
    config, rest_dtype = read_model_config(model)
    if prompt_len + gen_len > config.max_positions:
        raise UsageError(f"{prompt_len} + {gen_len} tokens are beyond the {config.max_positions} positions of {model}")
    profile = _profile(engine, hardware)
    if device == "sim":
        assert limits.gpu is not None
        profile = simulated_gpu(profile, limits.gpu, link)
    elif device.startswith("cpu"):
        profile = replace(profile, gpu=None, link=None)
    elif device.startswith("cuda") and profile.gpu is None:
        where = "this machine" if profile.name == MEASURED else profile.name
        raise UsageError(f"device {device!r} was asked for and {where} has no usable GPU; take --device cpu")
    situation = planning_problem(
        config,
        profile,
        Workload.uniform(prompt_len, gen_len, num_seqs or 1),
        precision=precision,
        rest_dtype=rest_dtype,
        limits=limits,
        overlap=arguments.get("overlap", True),
        cpu_attention=arguments.get("cpu_attention", True),
        endless=num_seqs is None,
    )
    return replace(situation, stages=stages), precision


def _profile(engine: EngineOptions, hardware: str) -> HardwareProfile:
    """The machine to plan for. Of this one, the disk is that of --offload-dir, with what is free there now."""
    from dataclasses import replace

    from flexgen_helm.checkpoint.paths import state_dir
    from flexgen_helm.engine.machine_profile import measured_profile, profile_named

    if hardware != "measured":
        if engine.offload_dir is not None:
            raise UsageError(f"--offload-dir is a folder of this machine, not of {hardware}; leave one of them out")
        return profile_named(hardware, say)
    folder = state_dir() / "offload" if engine.offload_dir is None else Path(engine.offload_dir)
    found = measured_profile(folder=folder, tell=say)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return replace(found, disk=replace(found.disk, bytes=shutil.disk_usage(existing).free))


def _make(engine: EngineOptions, situation: PlanningProblem, precision: str) -> Plan:
    from flexgen_helm.planner.plan import make_plan
    from flexgen_helm.planner.policy import Policy

    schedule = engine.schedule or "auto"
    given = engine.policy
    policy = None if given in (None, "auto") else Policy.parse(given)
    return make_plan(situation, precision, policy=policy, schedule=schedule, max_latency=engine.max_latency)  # type: ignore[arg-type]


def _print_plan(made: Plan, model: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from flexgen_helm.planner.cost_model import CACHE, HIDDEN, WEIGHTS
    from flexgen_helm.planner.placement import TIERS
    from flexgen_helm.planner.predict import placed_fractions

    console = Console(highlight=False)
    found, situation, policy = made.prediction, made.situation, made.policy
    batches = f"{policy.gpu_batch_size} x {policy.num_gpu_batches}"
    workload = situation.workload
    many = "" if situation.endless else f"{workload.num_sequences:,} x "
    console.print(
        f"{model} ({made.precision}) on {situation.hardware.name}: {many}{workload.prompt:,.0f} prompt + "
        f"{workload.output:,.0f} output tokens"
    )
    console.print(f"block {batches} sequences, schedule {made.schedule}")
    fractions = placed_fractions(situation, policy)
    table = Table("", *TIERS)
    for name, columns in (("weights", WEIGHTS), ("KV cache", CACHE), ("hidden states", HIDDEN)):
        table.add_row(name, *(f"{100 * fractions[columns[tier]]:.0f} %" for tier in TIERS))
    peaks = [found.memory[tier] for tier in TIERS]
    table.add_row("at most", *(_bytes(peak.peak) for peak in peaks))
    table.add_row("allowed", *(_bytes(peak.limit) for peak in peaks))
    table.add_row("working memory", *(_bytes(peak.workspace) if peak.workspace else "" for peak in peaks))
    console.print(table)
    if not found.feasible:
        console.print(made.why)
        return
    times = Table("seconds of a block", "prefill", "decode")
    labels = {
        "products": "products",
        "convert": "converting weights",
        "attention": "attention",
        "host_attention": "attention on the host",
        "to_gpu": "link in",
        "to_cpu": "link out",
        "disk_read": "disk read",
        "disk_write": "disk write",
    }
    for name, label in labels.items():
        spent = [found.seconds[phase].get(name, 0.0) for phase in ("prefill", "decode")]
        if max(spent) > 0:
            times.add_row(label, *(f"{seconds:,.1f}" for seconds in spent))
    times.add_row("together", f"{found.prefill_s:,.1f}", f"{found.decode_s:,.1f}")
    console.print(times)
    all_of_it = "a block" if situation.endless else "all sequences"
    console.print(f"{found.tokens_per_s:,.3g} token/s; {all_of_it} in {found.latency_s:,.1f} s")
    console.print(made.why, soft_wrap=True)


def _print_table(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("system", "model", "block", "wg/wc cg/cc hg/hc", "token/s", "predicted", "error", "")
    for row in found["rows"]:
        table.add_row(
            row.get("system", ""),
            row["model"],
            f"{row['gpu_batch_size']}x{row['num_gpu_batches']}",
            f"{row['wg']}/{row['wc']} {row['cg']}/{row['cc']} {row['hg']}/{row['hc']}",
            row.get("tokens_per_s", ""),
            f"{row['predicted_tokens_per_s']:.3g}" if row["feasible"] else "OOM",
            "" if row["error"] is None else f"{row['error']:+.0%}",
            row["bottleneck"],
        )
    console.print(table)
    summary = found["summary"]
    for name, part in (("all", summary), *summary["by_system"].items()):
        if part["n"]:
            console.print(
                f"{name}: median error {part['median_error']:.1%}, largest {part['max_error']:.0%}, {part['n']} rows"
            )


def _frontier(situation: PlanningProblem, precision: str, picture: Path | None, as_json: bool) -> None:
    from flexgen_helm.planner.frontier import frontier_points

    found = frontier_points(situation, _POINTS)
    if as_json:
        print_json({"hardware": situation.hardware.name, "precision": precision, "points": found})
    else:
        _print_points(found)
    if picture is not None:
        from flexgen_helm.report.pages import frontier_page

        with writing(picture):
            picture.write_text(frontier_page(found, situation).to_html(), encoding="utf-8")
        say(f"the picture is in {picture}")


def _print_points(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("latency of a block", "token/s", "block", "schedule", "wg/wc", "cg/cc", "hg/hc")
    for point in found:
        policy = point["policy"]
        shares = [f"{100 * policy[a]:.0f}/{100 * policy[b]:.0f}" for a, b in (("wg", "wc"), ("cg", "cc"), ("hg", "hc"))]
        block = f"{policy['gpu_batch_size']}x{policy['num_gpu_batches']}"
        table.add_row(
            f"{point['latency_s']:,.1f} s", f"{point['tokens_per_s']:.3g}", block, policy["schedule"], *shares
        )
    console.print(table)


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"
