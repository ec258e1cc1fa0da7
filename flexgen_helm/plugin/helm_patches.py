"""Everything of HELM that the plugin replaces, edits or calls though it is private: `PATCHES`, a table.

HELM gives a client one request per thread; it knows neither batches nor a client's files. So a plain `helm-run` is
patched when HELM loads the plugin, and `flexgen-helm run` adds two patches. Where a function of HELM has other
parameters than the table says, none of the command's patches are installed.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, reduce, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import yaml
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
from helm.common.object_spec import get_class_by_name
from helm.common.request import Request
from helm.proxy.retry import NonRetriableException

from flexgen_helm.checkpoint.names import PREFIX
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import count, replace_text
from flexgen_helm.plugin import deployment_files, registration
from flexgen_helm.plugin.context import get_context, interrupt_on_signals
from flexgen_helm.plugin.convert import HelmRequest, Submission, may_be_rendered, to_helm_request
from flexgen_helm.plugin.usage import HelmRun
from flexgen_helm.progress import ProgressPhase, report
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import SubmittedBlock

FIRST_FILE, LAST_FILE = "run_spec.json", "per_instance_stats.json"
DRY_RUN_FOLDER = "dry_run"
METRIC_CLASS = "flexgen_helm.plugin.metrics.FlexgenThroughputMetric"
Command = Literal["helm-run", "flexgen-helm run"]


@dataclass(frozen=True)
class HelmPatch:
    """One place of HELM that the plugin depends on though it is private.

    command: whose patches it belongs to.
    target: `module:name`, below `helm.benchmark`.
    parameters: the function's; None where a decorator hides them, or the target is data.
    purpose: what the plugin does there, and why.
    fallback: what users lose where it looks different.
    replacement: called with HELM's function and its arguments; None where the target is called or edited.
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
            if self.parameters is not None and tuple(inspect.signature(target).parameters) != self.parameters:
                raise TypeError(f"it takes {inspect.signature(target)}")
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(_unknown_helm(f"{self.target}: {error}")) from error

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


def _replaces(command: Command, target: str, parameters: str | None, fallback: str) -> Callable[[Any], Any]:
    """Add a patch to the table, whose purpose is the docstring of the decorated replacement."""

    def add(replacement: Callable[..., Any]) -> Callable[..., Any]:
        names = None if parameters is None else tuple(parameters.split())
        purpose = " ".join((replacement.__doc__ or "").split())
        PATCHES.append(HelmPatch(command, target, names, purpose, fallback, replacement))
        return replacement

    return add


def install(command: Command) -> None:
    """Install the patches of a command, once. Raises `UsageError` and installs none if one does not fit."""
    patches = [patch for patch in PATCHES if patch.command == command]
    for patch in patches:
        patch.check()
    for patch in patches:
        patch.install()


def install_or_warn() -> None:
    """Install the patches of `helm-run`; where they do not fit, HELM stays as it is and the user is told."""
    _show_refusals()
    try:
        install("helm-run")
    except UsageError as error:
        interrupt_on_signals()  # otherwise done when a run is submitted
        get_context().warn_once(f"{error}; until then batches are formed by waiting briefly")


def _show_refusals() -> None:
    """Show an error of ours that ends HELM's program as its sentence: the pages before it are HELM's and Python's."""
    original = sys.excepthook
    if hasattr(original, "flexgen_helm"):
        return

    def show(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        frames = [frame for frame, _ in traceback.walk_tb(at) if frame.f_code.co_name == "main"]
        modules = {getattr(frame.f_globals.get("__spec__"), "name", None) for frame in frames}
        if (
            isinstance(error, FlexgenError)
            and "helm.benchmark.run" in modules
            and not os.environ.get("FLEXGEN_HELM_DEBUG")
        ):
            print(f"flexgen_helm: {error}", file=sys.stderr)
        else:
            original(kind, error, at)

    show.flexgen_helm = True  # type: ignore[attr-defined]
    sys.excepthook = show


def _unknown_helm(reason: str) -> str:
    return f"flexgen_helm does not know this version of HELM ({reason}); run: pip install crfm-helm==0.5.16"


# ---- helm-run ----

_NO_RECORD = "No `flexgen_*` statistics and no `flexgen_run.json`."


class RunCollected(Exception):
    """Leaves a `run_one` of a suite's first pass whose requests have been made. HELM catches nothing on the way."""

    def __init__(self, submission: Submission | None) -> None:
        self.submission = submission


@_replaces("helm-run", "executor:Executor.execute", None, "Batches are what arrives within 50 ms of each other.")
def _execute(original: Callable[..., ScenarioState], executor: Executor, *args: Any, **kwargs: Any) -> ScenarioState:
    """Submits all requests of the run as one block, and then runs HELM's own function, which asks for one request per
    thread.
    """
    context = get_context()
    state = args[0] if args else kwargs.get("scenario_state")
    if not isinstance(state, ScenarioState) or not hasattr(executor, "execution_spec"):
        context.warn_once(_unknown_helm("Executor.execute has other arguments"))
        return original(executor, *args, **kwargs)
    if context.needs_requests is not None and not state.request_states:
        raise UsageError(_no_requests(context.needs_requests))
    submission = prepare_run(executor, state)
    if context.command.is_collecting:
        raise RunCollected(submission)
    if submission is None:
        return original(executor, *args, **kwargs)
    context.service.resume()
    with context.service.submit(*submission) as block:
        run = context.run
        if run is None:
            return original(executor, *args, **kwargs)
        run.execute_started = time.monotonic()
        import_classes(run.metric_classes, [block])
        state = original(executor, *args, **kwargs)
        run.record_block(context.service, block, submission.requests)
        if any(may_be_rendered(request_state.request) for request_state in state.request_states):
            run.chat_template = context.models.chat(run.model).as_json()
        context.command.add(run)
    return state


def _no_requests(run_spec: RunSpec) -> str:
    """Say that a scenario has nothing to evaluate: HELM passes over files that are missing, and would score nothing."""
    arguments = ", ".join(f"{name}={value}" for name, value in run_spec.scenario_spec.args.items())
    return f"no instances to evaluate: check {arguments or 'the data of the scenario'}"


def prepare_run(executor: Executor, state: ScenarioState) -> Submission | None:
    """Return the requests of a scenario state for the service; None if they are not ours or must not be executed."""
    spec = executor.execution_spec
    model = model_of(state.adapter_spec) if _is_executed(spec) else None
    if model is None:
        return None
    context, requests = get_context(), []
    try:
        for request_state in state.request_states:
            with suppress(NonRetriableException):  # this request fails alone, when the client gets it
                requests.append(to_helm_request(request_state.request, model, context.models))
    except (FlexgenError, ValueError):
        return None  # the client fails in the same way, where HELM reports it
    _tell_prompts(model, [state.request for state in state.request_states], requests)
    interrupt_on_signals()
    return Submission(model, requests, _uses_cache(spec))


def _uses_cache(spec: ExecutionSpec) -> bool:
    """Whether `--disable-cache` was not given."""
    return bool(spec.sqlite_cache_backend_config or spec.mongo_cache_backend_config)


def _tell_prompts(model: ModelArguments, requests: Sequence[Request], prepared: Sequence[HelmRequest]) -> None:
    """Tell the user once what becomes of prompts."""
    context = get_context()
    if any(map(may_be_rendered, requests)):
        with suppress(FlexgenError):  # the requests fail in the same way
            context.tell_once(context.models.chat(model).describe(model.name), False)
    if clipped := sum(request.is_clipped for request in prepared):
        name = context.run.name if context.run is not None else model.name
        context.tell_once(
            f"{clipped:,} of {count(len(prepared), 'request')} of {name} ask for more tokens than the model's window "
            "leaves, so their max_tokens is lowered to what is left",
            True,
        )


def _is_executed(spec: ExecutionSpec) -> bool:
    """Whether requests are computed in this process at all."""
    return not (spec.dry_run or spec.url)


def model_of(adapter_spec: AdapterSpec) -> ModelArguments | None:
    """Return the model of a run, None if it is not ours or is not found."""
    try:
        return registration.model_of(adapter_spec.model_deployment)
    except (FlexgenError, ValueError):
        return None  # HELM meets the same error where it reports it


def _is_ours(run_spec: RunSpec) -> bool:
    return model_of(run_spec.adapter_spec) is not None


def import_classes(names: Iterable[str], blocks: Iterable[SubmittedBlock]) -> None:
    """Import what HELM will import for its metrics (scikit-learn, NLTK: seconds) while the worker loads the model."""
    get_context().service.wait_for_imports(blocks)
    report(ProgressPhase("import"))
    for name in dict.fromkeys(names):
        with suppress(Exception):  # HELM reports it
            get_class_by_name(name)
    report(ProgressPhase("import", done=1, total=1))


@_replaces("helm-run", "runner:Runner.run_one", "self run_spec", _NO_RECORD)
def _run_one(original: Callable[..., None], runner: Runner, run_spec: RunSpec) -> None:
    """Appends our throughput metric, starts loading the model, and opens the record for `flexgen_run.json`."""
    context, folder = get_context(), Path(runner._get_run_path(run_spec))
    context.needs_requests = run_spec if _is_ours(run_spec) and not runner.skip_instances else None
    model = model_of(run_spec.adapter_spec) if _is_executed(runner.executor.execution_spec) else None
    with context.command.watched(runner, run_spec):
        if model is None:
            context.dry_run = folder if runner.dry_run and _is_ours(run_spec) else None
            return original(runner, run_spec)
        if not (runner.skip_completed_runs or runner.cache_instances_only):  # else perhaps nothing is computed
            context.service.preload(model, _uses_cache(runner.executor.execution_spec))
        metrics = run_spec.metric_specs
        if context.command.writes_entries:
            _write_entry(
                runner.executor.execution_spec.local_path or "prod_env", run_spec.adapter_spec.model_deployment
            )
        context.run = HelmRun(run_spec.name, folder, model, [metric.class_name for metric in metrics])
        try:
            original(runner, replace(run_spec, metric_specs=[*metrics, MetricSpec(METRIC_CLASS)]))
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
        "helm-run", "runner:Runner._get_run_path", ("self", "run_spec"), "Is called for the run's folder.", _NO_RECORD
    )
)


@_replaces("helm-run", "runner:write", "file_path content", "A run that was killed while it wrote may look complete.")
def _write(original: Callable[[str, str], None], file_path: str, content: str) -> None:
    """Replaces each file of a run of ours whole, removes the old last file before it writes the first, and writes
    `flexgen_run.json` before the last. So `--skip-completed-runs`, which tests only whether files exist, does not skip
    a run that was killed in between. The files of a dry run go into a folder of their own, so that they neither
    replace results nor pass for them.
    """
    run, path = get_context().run, Path(file_path)
    if path.parent == get_context().dry_run:
        path = path.parent / DRY_RUN_FOLDER / path.name
        path.parent.mkdir(exist_ok=True)
        return original(str(path), content)
    if run is None or path.parent != run.folder:
        return original(file_path, content)
    if path.name == FIRST_FILE:
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
    """Lets an adapter spec bring its own adapter (`make_adapter`), because HELM has a closed list of methods."""
    run = get_context().run
    if run is not None and run.adapt_started is None:
        run.adapt_started = time.monotonic()
    # HELM's specs have no such function; those of `flexgen_helm.scenarios.adapters` do.
    make_adapter = getattr(adapter_spec, "make_adapter", None)
    return original(adapter_spec, tokenizer_service) if make_adapter is None else make_adapter(tokenizer_service)


@_replaces(
    "helm-run",
    "run_expander:ModelRunExpander.replace_model_in_run_spec",
    "self model_deployment_name run_spec",
    "Run entries with `follow_format_instructions=instruct`, as those of HELM Lite, stop with an error.",
)
def _replace_model(original: Callable[..., RunSpec], expander: Any, name: str, run_spec: RunSpec) -> RunSpec:
    """Registers the model before the next expander reads its tags. HELM looks a deployment up after all expanders."""
    if name.startswith(PREFIX):
        get_model_deployment(name)
    return original(expander, name, run_spec)


PATCHES += [
    HelmPatch(
        "helm-run",
        registry,
        None,
        "Is edited: entries of `prod_env` are completed, and dropped where `flexgen-helm run` wrote them, because a "
        "name may mean another model now.",
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


@_replaces("flexgen-helm run", "run:register_builtin_configs_from_helm_package", "", _NO_SUITE)
def _register_builtin_configs(original: Callable[[], None]) -> None:
    """Reads HELM's own 600 kB of YAML by libyaml where PyYAML has it, in 0.1 s instead of 0.7."""
    own = yaml.SafeLoader
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", own)  # type: ignore[misc]
    try:
        original()
    finally:
        yaml.SafeLoader = own  # type: ignore[misc]


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
    return get_context().command.run_specs(original, run_entries, **filters)


@_replaces("flexgen-helm run", "runner:Runner.run_all", "self run_specs", _NO_SUITE)
def _run_all(original: Callable[..., None], runner: Runner, run_specs: list[RunSpec]) -> None:
    """Goes over all runs up to `Executor.execute` first, so that all requests of a model are one block."""
    get_context().command.collect(runner, run_specs)
    original(runner, run_specs)
