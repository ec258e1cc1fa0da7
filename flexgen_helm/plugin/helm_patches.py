"""The table `PATCHES`: all that the plugin replaces, edits or calls in HELM though it is private.

HELM gives a client one request per thread; it knows neither batches nor a client's files. So a
plain `helm-run` is patched when HELM loads the plugin, and `flexgen-helm run` adds two patches.
Where a function of HELM has other parameters than the table says, none of the command's patches are
installed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

from helm.benchmark.adaptation.adapter_spec import AdapterSpec
from helm.benchmark.adaptation.adapters.adapter import Adapter
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import Executor
from helm.benchmark.metrics.metric import MetricSpec
from helm.benchmark.model_deployment_registry import get_model_deployment
from helm.benchmark.presentation.run_entry import RunEntry
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner
from helm.benchmark.window_services.tokenizer_service import TokenizerService

from flexgen_helm.checkpoint.suffixes import PREFIX
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import naming, read_object, replace_text
from flexgen_helm.plugin import deployment_files
from flexgen_helm.plugin.context import get_context, interrupt_on_signals
from flexgen_helm.plugin.convert import may_be_rendered
from flexgen_helm.plugin.helm_log import HelmLog
from flexgen_helm.plugin.helm_patch import Command, HelmPatch
from flexgen_helm.plugin.request_lines import digest_of, request_lines
from flexgen_helm.plugin.submission import (
    Submission,
    is_executed,
    model_of_adapter,
    submission_of,
    uses_cache,
)
from flexgen_helm.plugin.usage import HelmRun
from flexgen_helm.progress import observed_by
from flexgen_helm.report.run_folder import DRY_RUN_FOLDER, INSTANCE_STATS_FILE, RUN_FILE, SPEC_FILE

METRIC_CLASS = "flexgen_helm.plugin.metrics.FlexgenThroughputMetric"
PATCHES: list[HelmPatch] = []


def _replaces(
    command: Command, target: str, parameters: str | None, fallback: str
) -> Callable[[Any], Any]:
    """Add a patch to the table, whose purpose is the docstring of the decorated replacement."""

    def add(replacement: Callable[..., Any]) -> Callable[..., Any]:
        names = None if parameters is None else tuple(parameters.split())
        purpose = " ".join((replacement.__doc__ or "").split())
        PATCHES.append(HelmPatch(command, target, names, purpose, fallback, replacement))
        return replacement

    return add


def install(command: Command) -> None:
    """Install the patches of a command, once. Raises `UsageError` and installs none if one does not
    fit.
    """
    patches = [patch for patch in PATCHES if patch.command == command]
    for patch in patches:
        patch.check()
    for patch in patches:
        patch.install()


def install_or_warn() -> None:
    """Install the patches of `helm-run`; where they do not fit, HELM stays as it is and the user is
    told.
    """
    _show_refusals()
    try:
        install("helm-run")
    except UsageError as error:
        interrupt_on_signals()  # otherwise done when a run is submitted
        get_context().warn_once(f"{error}; until then batches are formed by waiting briefly")


def _show_refusals() -> None:
    """Show an error of ours that ends HELM's program as its sentence: the pages before it are
    HELM's and Python's.
    """
    original = sys.excepthook
    if hasattr(original, "flexgen_helm"):
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frames = [frame for frame, _ in traceback.walk_tb(trace) if frame.f_code.co_name == "main"]
        modules = {getattr(frame.f_globals.get("__spec__"), "name", None) for frame in frames}
        if (
            isinstance(error, FlexgenError)
            and "helm.benchmark.run" in modules
            and not os.environ.get("FLEXGEN_HELM_DEBUG")
        ):
            print(f"flexgen_helm: {error}", file=sys.stderr)
        else:
            original(kind, error, trace)

    show.flexgen_helm = True  # type: ignore[attr-defined]
    sys.excepthook = show


# ---- helm-run ----

_NO_RECORD = "No `flexgen_*` statistics and no `flexgen_run.json`."


class RunCollected(Exception):
    """Leaves a `run_one` of a suite's first pass whose requests have been made. HELM catches
    nothing on the way.
    """

    def __init__(self, submission: Submission | None) -> None:
        self.submission = submission


@_replaces(
    "helm-run",
    "executor:Executor.execute",
    None,
    "Batches are what arrives within 50 ms of each other.",
)
def _execute(
    original: Callable[..., ScenarioState], executor: Executor, scenario_state: ScenarioState
) -> ScenarioState:
    """Submits all requests of the run as one block, and then runs HELM's own function, which asks
    for one request per thread.
    """
    context = get_context()
    run_spec = context.must_have_requests
    if run_spec is not None and not scenario_state.request_states:
        # HELM passes over files that are missing, and would score nothing.
        arguments = ", ".join(
            f"{name}={value}" for name, value in run_spec.scenario_spec.args.items()
        )
        raise UsageError(
            f"no instances to evaluate: check {arguments or 'the data of the scenario'}"
        )
    if context.suite is not None and context.run is not None:
        scenario_state = context.suite.sample.of_run(context.run, scenario_state)
    submission = submission_of(executor, scenario_state)
    if context.suite is not None and context.suite.is_collecting:
        raise RunCollected(submission)
    if submission is None:
        return original(executor, scenario_state)
    context.service.resume()
    with submission.submit(context.service) as block:
        run = context.run
        if run is None:
            return original(executor, scenario_state)
        run.execute_started = time.monotonic()
        answered = original(executor, scenario_state)
        run.record_block(context.service, block, submission.requests)
        run.requests_digest = digest_of(request_lines(answered.request_states))
        if any(may_be_rendered(state.request) for state in answered.request_states):
            run.chat_template = context.models.chat(run.model).as_json()
        if context.suite is not None:
            context.suite.add_executed(run)
    return answered


@_replaces("helm-run", "runner:Runner.run_one", "self run_spec", _NO_RECORD)
def _run_one(original: Callable[..., None], runner: Runner, run_spec: RunSpec) -> None:
    """Appends our throughput metric, starts loading the model, and opens the record for
    `flexgen_run.json`. Has `--skip-completed-runs` skip no sample.
    """
    context, folder = get_context(), Path(runner._get_run_path(run_spec))
    model, spec = model_of_adapter(run_spec.adapter_spec), runner.executor.execution_spec
    # HELM would take the run of a sample for completed.
    if runner.skip_completed_runs and read_object(folder / RUN_FILE).get("sample"):
        runner = copy(runner)
        runner.skip_completed_runs = False
    makes_requests = model is not None and not runner.skip_instances
    context.must_have_requests = run_spec if makes_requests else None
    with (
        context.suite.recorded_run(runner, run_spec)
        if context.suite is not None
        else observed_by(HelmLog())
    ):
        if model is None or not is_executed(spec):
            context.dry_run_folder = folder if runner.dry_run and model is not None else None
            return original(runner, run_spec)
        # With these flags perhaps nothing is computed.
        if not (runner.skip_completed_runs or runner.cache_instances_only):
            context.service.preload(model, uses_cache(spec))
        if context.suite is None:  # a suite has written the entries of all its runs
            _write_entry(spec.local_path or "prod_env", run_spec.adapter_spec.model_deployment)
        context.run = HelmRun(run_spec.name, folder, model)
        if context.suite is not None:
            context.run.entry = context.suite.entries.get(run_spec.name)
        try:
            original(
                runner,
                replace(run_spec, metric_specs=[*run_spec.metric_specs, MetricSpec(METRIC_CLASS)]),
            )
        finally:
            context.run = None


@cache
def _write_entry(folder: str, deployment: str) -> None:
    """Write what `helm-summarize` and `helm-server` need to know of a model; once a process."""
    if deployment.startswith(PREFIX):
        with suppress(OSError):  # a folder that cannot be written costs no scores
            deployment_files.add_entries(Path(folder), [deployment])


PATCHES.append(
    HelmPatch(
        "helm-run",
        "runner:Runner._get_run_path",
        ("self", "run_spec"),
        "Is called for the run's folder.",
        _NO_RECORD,
    )
)


@_replaces(
    "helm-run",
    "runner:write",
    "file_path content",
    "A run that was killed while it wrote may look complete.",
)
def _write(original: Callable[[str, str], None], file_path: str, content: str) -> None:
    """Replaces each file of a run of ours whole, removes the old last file before it writes the
    first, and writes `flexgen_run.json` before the last. So `--skip-completed-runs`, which tests
    only whether files exist, does not skip a run that was killed in between. The files of a dry run
    go into a folder of their own, so that they neither replace results nor pass for them.
    """
    run, path = get_context().run, Path(file_path)
    if path.parent == get_context().dry_run_folder:
        path = path.parent / DRY_RUN_FOLDER / path.name
        path.parent.mkdir(exist_ok=True)
        return original(str(path), content)
    if run is None or path.parent != run.folder:
        with naming(path):
            return original(file_path, content)
    if path.name == SPEC_FILE:
        (path.parent / INSTANCE_STATS_FILE).unlink(missing_ok=True)
    if path.name == INSTANCE_STATS_FILE:
        run.write()
    replace_text(path, content)


@_replaces(
    "helm-run",
    "adaptation.adapters.adapter_factory:AdapterFactory.get_adapter",
    "adapter_spec tokenizer_service",
    "`lambada` and `wikitext` stop with an error in their metrics.",
)
def _get_adapter(
    original: Callable[..., Adapter], adapter_spec: AdapterSpec, tokenizer_service: TokenizerService
) -> Adapter:
    """Lets an adapter spec bring its own adapter (`make_adapter`), because HELM has a closed list
    of methods.
    """
    run = get_context().run
    if run is not None and run.adapt_started is None:
        run.adapt_started = time.monotonic()
    # HELM's specs have no such function; those of `flexgen_helm.scenarios.adapters` do.
    make_adapter = getattr(adapter_spec, "make_adapter", None)
    return (
        original(adapter_spec, tokenizer_service)
        if make_adapter is None
        else make_adapter(tokenizer_service)
    )


@_replaces(
    "helm-run",
    "run_expander:ModelRunExpander.replace_model_in_run_spec",
    "self model_deployment_name run_spec",
    "Run entries with `follow_format_instructions=instruct`, as those of HELM Lite, stop with "
    "an error.",
)
def _replace_model(
    original: Callable[..., RunSpec], expander: Any, name: str, run_spec: RunSpec
) -> RunSpec:
    """Registers the model before the next expander reads its tags. HELM looks a deployment up after
    all expanders.
    """
    if name.startswith(PREFIX):
        get_model_deployment(name)
    return original(expander, name, run_spec)


PATCHES += [
    HelmPatch(
        "helm-run",
        registry,
        None,
        "Is edited: entries of `prod_env` are completed, and dropped where `flexgen-helm run` "
        "wrote them, because a name may mean another model now.",
        "Nothing is registered, and HELM prints why; `flexgen-helm doctor` fails.",
    )
    for registry in (
        "model_deployment_registry:ALL_MODEL_DEPLOYMENTS",
        "model_deployment_registry:DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT",
        "model_metadata_registry:ALL_MODELS_METADATA",
        "model_metadata_registry:MODEL_NAME_TO_MODEL_METADATA",
        "tokenizer_config_registry:ALL_TOKENIZER_CONFIGS",
        "tokenizer_config_registry:TOKENIZER_NAME_TO_CONFIG",
    )
]


# ---- flexgen-helm run ----

_NO_SUITE = "`flexgen-helm run` refuses to start; `helm-run` works."


@_replaces(
    "flexgen-helm run",
    "run:run_entries_to_run_specs",
    "run_entries max_eval_instances num_train_trials models_to_run groups_to_run priority",
    _NO_SUITE,
)
def _run_entries_to_run_specs(
    original: Callable[..., list[RunSpec]], run_entries: list[RunEntry], **filters: Any
) -> list[RunSpec]:
    """Writes model names as HELM needs them, and multiplies runs by `--precision`."""
    suite = get_context().suite
    return (
        original(run_entries, **filters)
        if suite is None
        else suite.run_specs(original, run_entries, **filters)
    )


@_replaces("flexgen-helm run", "runner:Runner.run_all", "self run_specs", _NO_SUITE)
def _run_all(original: Callable[..., None], runner: Runner, run_specs: list[RunSpec]) -> None:
    """Goes over all runs up to `Executor.execute` first, so that all requests of a model are one
    block.
    """
    if (suite := get_context().suite) is not None:
        suite.compute_all(runner, run_specs, partial(original, runner, run_specs))
    original(runner, run_specs)
