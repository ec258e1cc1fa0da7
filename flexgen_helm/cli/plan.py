"""`flexgen-helm plan`: the policy for a model on a machine, what it costs, and why."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.cli.console import output, print_csv, print_json, print_table, say, write_file
from flexgen_helm.cli.flags import CsvFlag, JsonFlag, require_folder
from flexgen_helm.config import EngineConfig, EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.files import existing_folder

if TYPE_CHECKING:
    import pandas

    from flexgen_helm.hardware.profile import HardwareProfile
    from flexgen_helm.planner.plan import Plan
    from flexgen_helm.planner.problem import PlanningProblem

# Points of a frontier, from the quickest block to the best one.
_POINTS = 12
_COST_LABELS = {
    "products": "products",
    "convert": "converting weights",
    "attention": "attention",
    "host_attention": "attention on the host",
    "to_gpu": "link in",
    "to_cpu": "link out",
    "disk_read": "disk read",
    "disk_write": "disk write",
}


def plan(
    engine: EngineOptions,
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="Catalog name, org--repo of the hub or a folder.")
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
        Path | None,
        typer.Option(metavar="FILE.html", help="With --frontier: also as a picture.", callback=require_folder),
    ] = None,
    from_csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Evaluate each row of a table of throughputs instead.")
    ] = None,
    as_json: JsonFlag = False,
    as_csv: CsvFlag = False,
) -> None:
    """Search the best policy, or evaluate the one given with --policy."""
    config = EngineConfig(**engine)
    if from_csv is not None:
        if not set(engine) <= {"offload_dir"} or any(
            (model, prompt_len, gen_len, num_seqs, compress, stages > 1, frontier, picture)
        ):
            raise UsageError(
                "--from-csv says for each row what to evaluate; leave everything out but --hardware, --json and --csv"
            )
        _evaluate_table(from_csv, _profile(config, hardware), as_json, as_csv)
        return
    if model is None or prompt_len is None or gen_len is None:
        raise UsageError("plan needs --model, --prompt-len and --gen-len, or --from-csv FILE")
    if as_csv and not frontier:
        raise UsageError("--csv is for tables; add --frontier or --from-csv, or take --json")
    _check_search(config, gen_len, frontier, picture)
    precision = _precision_name(config, model, compress)
    problem = _problem(config, model, prompt_len, gen_len, num_seqs, hardware, precision, stages)
    if frontier:
        _search_frontier(problem, precision, picture, as_json, as_csv)
        return
    from flexgen_helm.planner.plan import make_plan

    made = make_plan(problem, policy=config.fixed_policy, schedule=config.schedule, max_latency=config.max_latency)
    if as_json:
        print_json({"model": model, "hardware": problem.hardware.name, **made.to_json()})
    else:
        _print_plan(made, model)


def _check_search(config: EngineConfig, gen_len: int, frontier: bool, picture: Path | None) -> None:
    """Refuse options without effect before anything is measured."""
    schedule, has_policy = config.schedule, config.fixed_policy is not None
    if schedule == "prefill-only" and gen_len > 1:
        raise UsageError(
            f"--gen-len is {gen_len} and the schedule prefill-only draws one token; take --schedule zigzag"
        )
    if schedule not in ("auto", "prefill-only") and gen_len == 1 and not has_policy:
        raise UsageError("a single token is searched for with prefill-only; leave --schedule out")
    if picture is not None and not frontier:
        raise UsageError(f"--picture {picture} is for a frontier; add --frontier")
    useless = {
        "--policy": has_policy,
        "--max-latency": config.max_latency is not None,
        "--schedule": schedule != "auto",
    }
    for flag, is_given in useless.items():
        if frontier and is_given:
            raise UsageError(f"--frontier searches under limits of its own; leave {flag} out")


def _precision_name(config: EngineConfig, model: str, compress: bool) -> str:
    """Return the precision of the flags or of the model's name; --compress quantizes one that is not quantized."""
    from flexgen_helm.checkpoint.names import resolve
    from flexgen_helm.quant.precisions import Precision, precision_named

    assert not isinstance(config.precision, Precision)  # flags are text
    name = config.precision or resolve(model).precision
    if not compress or precision_named(name).weights is not None:
        return precision_named(name).name
    if config.precision is not None:
        raise UsageError(f"--compress is 4 bits and --precision {name} is not; leave one of them out")
    return name.replace("fp16", "4bit")


def _problem(
    config: EngineConfig,
    model: str,
    prompt_len: int,
    gen_len: int,
    num_seqs: int | None,
    hardware: str,
    precision: str,
    stages: int,
) -> PlanningProblem:
    from flexgen_helm.checkpoint.names import read_model_config
    from flexgen_helm.planner.plan import planning_problem, simulated_gpu
    from flexgen_helm.planner.problem import MEASURED
    from flexgen_helm.planner.workload import Workload

    for flag, value in (("--prompt-len", prompt_len), ("--gen-len", gen_len), ("--num-seqs", num_seqs)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} is no length; it must be 1 or more")
    model_config, dtype = read_model_config(model)
    if prompt_len + gen_len > model_config.max_positions:
        raise UsageError(
            f"{prompt_len} + {gen_len} tokens are beyond the {model_config.max_positions} positions of {model}"
        )
    profile = _profile(config, hardware)
    if config.device == "sim":
        assert config.limits.gpu is not None  # checked by EngineConfig
        profile = simulated_gpu(profile, config.limits.gpu, config.link_gb_s)
    elif config.device.startswith("cpu"):
        profile = replace(profile, gpu=None, link=None)
    elif config.device.startswith("cuda") and profile.gpu is None:
        machine = "this machine" if profile.name == MEASURED else profile.name
        raise UsageError(f"device {config.device!r} was asked for and {machine} has no usable GPU; take --device cpu")
    problem = planning_problem(
        model_config,
        profile,
        Workload.uniform(prompt_len, gen_len, num_seqs or 1),
        precision=precision,
        storage_dtype=dtype,
        limits=config.limits,
        overlap=config.overlap,
        cpu_attention=config.cpu_attention,
        endless=num_seqs is None,
    )
    return replace(problem, stages=stages)


def _profile(config: EngineConfig, hardware: str) -> HardwareProfile:
    """Return the machine to plan for; this machine's disk is that of --offload-dir, with what is free there now."""
    from flexgen_helm.checkpoint.paths import state_dir
    from flexgen_helm.engine.machine_profile import measured_profile, profile_named

    if hardware != "measured":
        if config.offload_dir is not None:
            raise UsageError(f"--offload-dir is a folder of this machine, not of {hardware}; leave one of them out")
        return profile_named(hardware)
    folder = state_dir() / "offload" if config.offload_dir is None else Path(config.offload_dir)
    profile = measured_profile(folder=folder)
    return replace(profile, disk=replace(profile.disk, bytes=shutil.disk_usage(existing_folder(folder)).free))


def _print_plan(made: Plan, model: str) -> None:
    import pandas

    from flexgen_helm.planner.affine import fractions_by_kind
    from flexgen_helm.planner.placement import TIERS
    from flexgen_helm.planner.predict import placed_fractions

    problem, policy, prediction = made.problem, made.solution.policy, made.solution.prediction
    workload, console = problem.workload, output()
    count = "" if problem.endless else f"{workload.num_sequences:,} x "
    console.print(
        f"{model} ({problem.precision.name}) on {problem.hardware.name}: {count}{workload.prompt:,.0f} prompt + "
        f"{workload.output:,.0f} output tokens"
    )
    block = f"{policy.gpu_batch_size} x {policy.num_gpu_batches}"
    console.print(f"block {block} sequences, schedule {made.solution.schedule}")
    fractions, memory = fractions_by_kind(placed_fractions(problem, policy)), prediction.memory
    kinds = {"weights": "weights", "cache": "KV cache", "activations": "hidden states"}
    tiers = {tier: [f"{100 * shares[tier]:.0f} %" for shares in fractions.values()] for tier in TIERS}
    for tier, cells in tiers.items():
        workspace = memory[tier].workspace
        cells += [_bytes(memory[tier].peak), _bytes(memory[tier].limit), _bytes(workspace) if workspace else ""]
    print_table(pandas.DataFrame({"": [*kinds.values(), "at most", "allowed", "working memory"], **tiers}))
    if prediction.feasible:
        seconds = pandas.DataFrame(prediction.seconds).reindex(list(_COST_LABELS)).fillna(0.0)
        seconds = seconds[seconds.max(axis=1) > 0].rename(_COST_LABELS)
        seconds.loc["together"] = [prediction.prefill_s, prediction.decode_s]
        formats = dict.fromkeys(prediction.seconds, "{:,.1f}".format)
        print_table(seconds.rename_axis("seconds of a block").reset_index(), formats=formats)
        scope = "a block" if problem.endless else "all sequences"
        console.print(f"{prediction.tokens_per_s:,.3g} token/s; {scope} in {prediction.latency_s:,.1f} s")
    console.print(made.why, soft_wrap=True)


def _evaluate_table(path: Path, hardware: HardwareProfile, as_json: bool, as_csv: bool) -> None:
    """Print the prediction for every row of a table, and the errors."""
    import pandas

    from flexgen_helm.benchmarks.paper.tables import evaluate_csv

    result = evaluate_csv(path, hardware)
    if as_json:
        print_json(result)
        return
    rows = pandas.DataFrame(result["rows"])
    if as_csv:
        print_csv(rows.drop(columns="missing_bytes"))
        return
    shares = [rows[[f"{kind}g", f"{kind}c"]].agg("/".join, axis=1) for kind in "wch"]
    table = rows.reindex(columns=["system", "model"]).fillna("")
    table["block"] = rows["gpu_batch_size"] + "x" + rows["num_gpu_batches"]
    table["wg/wc cg/cc hg/hc"] = pandas.concat(shares, axis=1).agg(" ".join, axis=1)
    table["token/s"] = rows.get("tokens_per_s", "")
    table["predicted"] = rows["predicted_tokens_per_s"].map("{:.3g}".format).where(rows["feasible"], "OOM")
    table["error"] = rows["error"]
    table["bottleneck"] = rows["bottleneck"]
    print_table(table, formats={"error": "{:+.0%}".format})
    for name, errors in {"all": result["summary"], **result["summary"]["by_system"]}.items():
        if errors["n"]:
            median, largest = errors["median_error"], errors["max_error"]
            output().print(f"{name}: median error {median:.1%}, largest {largest:.0%}, {errors['n']} rows")


def _search_frontier(
    problem: PlanningProblem, precision: str, picture: Path | None, as_json: bool, as_csv: bool
) -> None:
    """Print the points of the frontier, and draw them."""
    import pandas

    from flexgen_helm.planner.frontier import frontier_points

    points = frontier_points(problem, _POINTS)
    rows = pandas.DataFrame([{**point, **point["policy"]} for point in points]).drop(columns="policy")
    if as_json:
        print_json({"hardware": problem.hardware.name, "precision": precision, "points": points})
    elif as_csv:
        print_csv(rows)
    else:
        print_table(_frontier_table(rows), formats={"latency of a block": "{:,.1f} s".format})
    if picture is not None:
        from flexgen_helm.report.pages import frontier_page

        write_file(picture, frontier_page(points, problem).to_html())
        say(f"the picture is in {picture}")


def _frontier_table(rows: pandas.DataFrame) -> pandas.DataFrame:
    table = rows[["latency_s", "tokens_per_s"]].copy()
    table.columns = ["latency of a block", "token/s"]
    table["token/s"] = table["token/s"].map("{:.3g}".format)
    table["block"] = rows["gpu_batch_size"].astype(str) + "x" + rows["num_gpu_batches"].astype(str)
    table["schedule"] = rows["schedule"]
    for gpu, cpu in (("wg", "wc"), ("cg", "cc"), ("hg", "hc")):
        table[f"{gpu}/{cpu}"] = rows[[gpu, cpu]].mul(100).map("{:.0f}".format).agg("/".join, axis=1)
    return table


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"
