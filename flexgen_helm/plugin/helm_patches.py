"""Everything of HELM that the plugin replaces, edits or calls though it is private: `PATCHES`, a
table.

HELM gives a client one request per thread; it knows neither batches nor a client's files. So a
plain `helm-run` is patched when HELM loads the plugin, and `flexgen-helm run` adds two patches.
Where a function of HELM has other parameters than the table says, none of the command's patches are
installed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial, reduce, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from helm.benchmark.adaptation.adapter_spec import AdapterSpec
from helm.benchmark.adaptation.adapters.adapter import Adapter
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import ExecutionSpec, Executor
from helm.benchmark.metrics.metric import MetricSpec
from helm.benchmark.model_deployment_registry import get_model_deployment
from helm.benchmark.presentation.run_entry import RunEntry
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner
from helm.benchmark.window_services.tokenizer_service import TokenizerService
from helm.common.hierarchical_logger import hlog, hwarn
from helm.proxy.retry import NonRetriableException

from flexgen_helm.checkpoint.suffixes import PREFIX
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import naming, read_object, replace_text
from flexgen_helm.plugin import deployment_files, registration
from flexgen_helm.plugin.context import get_context, interrupt_on_signals
from flexgen_helm.plugin.convert import Submission, may_be_rendered, to_helm_request
from flexgen_helm.plugin.usage import HelmRun, digest_of, request_lines
from flexgen_helm.progress import (
    Event,
    Message,
    ModelInUse,
    PlanLine,
    Progress,
    ProgressPhase,
    describe,
    observed_by,
)
from flexgen_helm.report.answers import DRY_RUN_FOLDER, LAST_FILE, RUN_FILE, SPEC_FILE
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.units import count

METRIC_CLASS = "flexgen_helm.plugin.metrics.FlexgenThroughputMetric"
# Seconds between two lines of a block's progress in HELM's log.
LINE_EVERY_S = 30.0
Command = Literal["helm-run", "flexgen-helm run"]


@dataclass(frozen=True)
class HelmPatch:
    """One place of HELM that the plugin depends on though it is private.

    command: whose patches it belongs to.
    target: `module:name`, below `helm.benchmark`.
    parameters: the function's; None where a decorator hides them, or the target is data.
    purpose: what the plugin does there, and why.
    fallback: what users lose where it looks different.
    replacement: called with HELM's function and its arguments; None where the target is called or
        edited.
    """

    command: Command
    target: str
    parameters: tuple[str, ...] | None
    purpose: str
    fallback: str
    replacement: Callable[..., Any] | None = None

    def owner(self) -> tuple[Any, str]:
        """Return the object that has the target as an attribute, and the attribute's name."""
        module, _, path = self.target.partition(":")
        *outer, name = path.split(".")
        return reduce(getattr, outer, importlib.import_module(f"helm.benchmark.{module}")), name

    def check(self) -> None:
        """Raise `UsageError` if HELM's target is missing or has other parameters."""
        try:
            target = getattr(*self.owner())
            if (
                self.parameters is not None
                and tuple(inspect.signature(target).parameters) != self.parameters
            ):
                raise TypeError(f"it takes {inspect.signature(target)}")
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"flexgen_helm does not know this version of HELM ({self.target}: {error}); run: "
                "pip install crfm-helm==0.5.16"
            ) from error

    def install(self) -> None:
        """Replace the target, once."""
        owner, name = self.owner()
        original, replacement = getattr(owner, name), self.replacement
        if replacement is None or hasattr(original, "flexgen_helm"):
            return

        @wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        patched.flexgen_helm = True  # type: ignore[attr-defined]
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(patched) if is_static else patched)


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


class HelmLog:
    """An observer that writes to HELM's log: each plan and message, and a line of progress now and
    then.
    """

    def __init__(self) -> None:
        self._model = ""
        self._phase = ""
        self._last_line = time.monotonic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Message):
            (hwarn if event.is_warning else self._say)(event.text)
        elif isinstance(event, ModelInUse):
            self._model = describe(event)
        elif isinstance(event, PlanLine):
            self._say(f"{self._model}: {event.text}")
        elif isinstance(event, ProgressPhase):
            if (
                event.name != self._phase
                and not event.is_finished
                and event.name in ("fetch", "convert", "measure")
            ):
                self._say(describe(event))
            self._phase = event.name
        elif isinstance(event, Progress) and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._say(describe(event))

    def _say(self, text: str) -> None:
        self._last_line = time.monotonic()
        hlog(f"flexgen_helm: {text}")


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
        scenario_state = context.suite.sampled(context.run, scenario_state)
    submission = prepare_run(executor, scenario_state)
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


def prepare_run(executor: Executor, scenario_state: ScenarioState) -> Submission | None:
    """Return the requests of a scenario state for the service; None if they are not ours or must
    not be executed.
    """
    spec = executor.execution_spec
    model = model_of_adapter(scenario_state.adapter_spec) if _is_executed(spec) else None
    if model is None:
        return None
    context, requests, instances = get_context(), [], []
    try:
        for state in scenario_state.request_states:
            # this request fails alone, when the client gets it
            with suppress(NonRetriableException):
                requests.append(to_helm_request(state.request, model, context.models))
                instances.append((str(state.instance.id), state.instance.split))
    except (FlexgenError, ValueError):
        return None  # the client fails in the same way, where HELM reports it
    if any(may_be_rendered(state.request) for state in scenario_state.request_states):
        with suppress(FlexgenError):  # the requests fail in the same way
            context.tell_once(context.models.chat(model).describe(model.name), is_warning=False)
    if clipped := sum(request.is_clipped for request in requests):
        name = context.run.name if context.run is not None else model.name
        context.tell_once(
            f"{clipped:,} of {count(len(requests), 'request')} of {name} ask for more tokens than "
            "the model's window leaves, so their max_tokens is lowered to what is left",
            is_warning=True,
        )
    interrupt_on_signals()
    return Submission(model, requests, _uses_cache(spec), instances)


def _uses_cache(spec: ExecutionSpec) -> bool:
    """Whether `--disable-cache` was not given."""
    return bool(spec.sqlite_cache_backend_config or spec.mongo_cache_backend_config)


def _is_executed(spec: ExecutionSpec) -> bool:
    """Whether requests are computed in this process at all."""
    return not (spec.dry_run or spec.url)


def model_of_adapter(adapter_spec: AdapterSpec) -> ModelArguments | None:
    """Return the model of a run, None if it is not ours or is not found."""
    try:
        return registration.model_of(adapter_spec.model_deployment)
    except (FlexgenError, ValueError):
        return None  # HELM meets the same error where it reports it


@_replaces("helm-run", "runner:Runner.run_one", "self run_spec", _NO_RECORD)
def _run_one(original: Callable[..., None], runner: Runner, run_spec: RunSpec) -> None:
    """Appends our throughput metric, starts loading the model, and opens the record for
    `flexgen_run.json`. Has `--skip-completed-runs` skip no sample.
    """
    context, folder = get_context(), Path(runner._get_run_path(run_spec))
    model, spec = model_of_adapter(run_spec.adapter_spec), runner.executor.execution_spec
    # which HELM takes for completed
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
        if model is None or not _is_executed(spec):
            context.dry_run_folder = folder if runner.dry_run and model is not None else None
            return original(runner, run_spec)
        # else perhaps nothing is computed
        if not (runner.skip_completed_runs or runner.cache_instances_only):
            context.service.preload(model, _uses_cache(spec))
        if context.suite is None:  # which has written those of all runs
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
            deployment_files.merge(Path(folder), [deployment])


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
        (path.parent / LAST_FILE).unlink(missing_ok=True)
    if path.name == LAST_FILE:
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
    (
        "Run entries with `follow_format_instructions=instruct`, as those of HELM Lite, stop with "
        "an error."
    ),
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
