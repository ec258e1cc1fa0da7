"""`flexgen-helm run`: helm-run with suite-wide blocks, progress and the engine flags."""

from __future__ import annotations

import codecs
import locale
import math
import os
import shlex
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flexgen_helm.checkpoint.paths import state_dir
from flexgen_helm.checkpoint.system_errors import GIVEN_FOLDERS
from flexgen_helm.cli.arguments import (
    DEFAULT_OUTPUT,
    Hours,
    RayAddress,
    RayCores,
    RayWorkers,
    UntilTime,
    ray_session,
    seconds_left,
)
from flexgen_helm.cli.console import say
from flexgen_helm.cli.engine_flags import check_engine_flags
from flexgen_helm.cli.helm_flags import check_helm_flags, parse_helm_flags
from flexgen_helm.cli.report import check_margin, print_page
from flexgen_helm.cli.screen import Screen
from flexgen_helm.config import EngineConfig, EngineOptions
from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.files import count, duration, read_object, require_writable
from flexgen_helm.hardware.cuda_presence import why_no_cuda
from flexgen_helm.locks import sole_writer
from flexgen_helm.progress import ProgressPhase, report
from flexgen_helm.quant.precisions import split_precisions
from flexgen_helm.run_entries import check_arguments, given_models

if TYPE_CHECKING:
    from flexgen_helm.distributed.ray_cluster import RaySession
    from flexgen_helm.plugin.suite import SuiteOutcome


class SuiteEnd(NamedTuple):
    """When a suite ends, as of `run_suite`."""

    until: float
    margin: float | None


# Logs that are kept; older ones are deleted.
_MAX_LOGS = 20


def run(
    context: typer.Context,
    engine: EngineOptions,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Print HELM's own output instead of writing it to a log file."
        ),
    ] = False,
    ray: RayAddress = None,
    ray_workers: RayWorkers = None,
    ray_cores: RayCores = None,
    until: UntilTime = None,
    hours: Hours = None,
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided", help="End when every pair of precisions or models is decided."
        ),
    ] = False,
    margin: Annotated[float, typer.Option(help="With --until-decided: as of compare.")] = 1.0,
) -> None:
    """Run HELM's evaluations with models that need not fit into memory.

    All flags of helm-run are accepted (`helm-run --help` has those that are rarely needed). The
    requests of all runs are computed in one block a model. Interrupted, the same command continues
    where it stopped. The engine flags override the deployment file; --precision may name several,
    with commas between, for `flexgen-helm compare`.

    Example:
      flexgen-helm run -r simple_mcqa:model=flexgen/smollm2-135m-instruct-q4_1 \\
        -m 10 --suite first
    """
    left_s, end = seconds_left(until, hours), None
    if until_decided:
        end = SuiteEnd(time.time() + (math.inf if left_s is None else left_s), check_margin(margin))
    elif left_s is not None:
        end = SuiteEnd(time.time() + left_s, None)
    check_helm_flags(context, context.args, is_sample=end is not None)
    cluster = ray_session(ray, ray_workers, ray_cores)
    check_engine_flags(engine, is_local=cluster is None)
    raise typer.Exit(run_and_show(context.args, engine, verbose, cluster, end))


def run_and_show(
    arguments: Sequence[str],
    engine: EngineOptions,
    verbose: bool = False,
    cluster: RaySession | None = None,
    end: SuiteEnd | None = None,
) -> int:
    """Run a suite with a panel, print its scores and what went wrong; return the exit code."""
    began = time.monotonic()
    _require_utf8()
    precisions = split_precisions(engine.get("precision", ""))
    flags = parse_helm_flags(arguments)
    for hint in check_arguments(flags, needs_weights=engine.get("weights") != "dummy"):
        say(hint)
    _check_memory(flags, engine)
    output = Path(flags.output_path or DEFAULT_OUTPUT)
    suite = output / "runs" / (flags.suite or "default")
    entries = Path(flags.local_path or "prod_env")
    for folder, flag in ((output, "-o"), (suite, "--suite"), (entries, "--local-path")):
        GIVEN_FOLDERS[flag] = folder
        require_writable(folder, flag, "name another folder")
    log = None if verbose else _new_log()
    # stdout is for the scores
    with redirect_stdout(sys.stderr) if log is None else Screen(log, precisions):
        # HELM takes the last of a list's flag: the one that has all.
        joined = [word for flag, values in flags.joined.items() for word in (flag, *values)]
        with sole_writer(suite, "--suite"):
            report(ProgressPhase("start"))
            if cluster is not None:
                cluster.connect_soon()  # while HELM is imported
            from flexgen_helm.plugin.suite import run_suite

            outcome = run_suite([*arguments, *joined], engine, cluster, *(end or ()))
    with Screen():  # pandas takes a second to import
        _print_scores(outcome, output)
    if log is not None:
        warnings = (
            f", {count(outcome.num_warnings, 'warning')} included" if outcome.num_warnings else ""
        )
        say(f"{duration(time.monotonic() - began)} in all. HELM's own output{warnings}: {log}")
    for sentence in outcome.sentences:
        say(f"flexgen-helm: {sentence}")
    if outcome.exit_code == 130:
        # Without the cache only whole runs are kept.
        more = (
            ["--skip-completed-runs"]
            if flags.disable_cache and not flags.skip_completed_runs
            else []
        )
        say(f"Go on with:\n  {shlex.join(['flexgen-helm', *sys.argv[1:], *more])}")
    return outcome.exit_code


def _require_utf8() -> None:
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name != "utf-8":
        raise UsageError(
            f"HELM reads its own files, which are UTF-8, as {encoding}, this locale's; set "
            "PYTHONUTF8=1"
        )


def _check_memory(flags: Namespace, engine: EngineOptions) -> None:
    """Refuse a limit with which no request can run, before HELM reads data; only what is certain
    without torch.
    """
    config = EngineConfig(**{name: value for name, value in engine.items() if name != "precision"})
    is_cpu = config.device.startswith("cpu") or (
        config.device == "auto" and why_no_cuda() is not None
    )
    if config.limits.cpu is None or config.fixed_policy is not None or not is_cpu:
        return
    from flexgen_helm.checkpoint.names import planned_precision, read_model_config
    from flexgen_helm.planner.least_memory import least_limit, require_least_memory
    from flexgen_helm.planner.machine import Machine
    from flexgen_helm.planner.storage_sizes import StorageSizes

    refused: dict[int, MemoryLimitError] = {}
    machine = Machine({"gpu": 0, "cpu": config.limits.cpu, "disk": 0}, "cpu")
    for model in given_models(flags):
        with suppress(UsageError):  # is said where the model is looked up
            sizes = read_model_config(model)[0]
            precisions = split_precisions(engine.get("precision", ""))
            for precision in precisions or [model.options.get("precision", "fp16")]:
                storage = StorageSizes(sizes, planned_precision(model, precision))
                try:
                    require_least_memory(storage, machine, model.name)
                except MemoryLimitError as error:
                    refused[least_limit(storage, machine.compute_bytes)] = error
    if refused:
        raise refused[max(refused)]  # what is enough for all of them


def _new_log() -> Path:
    folder, name = state_dir() / "logs", f"{time.strftime('run-%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("run-*.log"))[: 1 - _MAX_LOGS]:
            old.unlink(missing_ok=True)
        (folder / name).touch()  # the folder may be there and read-only
    except OSError:  # a home that cannot be written costs no results
        folder = Path(tempfile.gettempdir())
    return folder / name


def _print_scores(outcome: SuiteOutcome, output: Path) -> None:
    """Print the scores of the runs of this call that did not fail; output: the folder that has
    `runs`.
    """
    from flexgen_helm.report.pages import scores_page
    from flexgen_helm.report.scores import read_scores

    if outcome.is_dry and (outcome.finished or not outcome.sentences):
        from flexgen_helm.report.answers import DRY_RUN_FOLDER, STATE_FILE

        files = [folder / DRY_RUN_FOLDER / STATE_FILE for folder in outcome.finished]
        requests = sum(len(read_object(file).get("request_states", ())) for file in files)
        say(
            f"Dry run: {count(requests, 'request')} of {count(len(files), 'run')} were made, and "
            f"nothing was computed. The prompts are in {DRY_RUN_FOLDER}/{STATE_FILE} of "
            "each run."
        )
        for folder in outcome.finished[:1]:
            suite = folder.parent.relative_to(output / "runs")
            words = ["plan", "-c", "FILE", "--model", "MODEL", "--suite", str(suite)]
            words += [] if output == DEFAULT_OUTPUT else ["-o", str(output)]
            say(f"How long they take:\n  {shlex.join(['flexgen-helm', *words])}")
        return
    finished = []
    for folder in outcome.finished:
        with suppress(OSError, ValueError, KeyError):  # nothing to score
            finished.append(read_scores(folder))
    if finished:
        folder = outcome.finished[0].parent
        print_page(scores_page(folder, finished))
        flags = ["--suite", str(folder.relative_to(output / "runs"))]
        flags += [] if output == DEFAULT_OUTPUT else ["-o", str(output)]
        say(f"More about it:\n  {shlex.join(['flexgen-helm', 'report', *flags])}")
        precisions = [run.precision for run in finished]
        if len({(run.model, run.precision) for run in finished}) > len(
            {run.model for run in finished}
        ):
            flags += [] if "fp16" in precisions else ["--baseline", precisions[0]]
            say(f"Compare the precisions:\n  {shlex.join(['flexgen-helm', 'compare', *flags])}")
