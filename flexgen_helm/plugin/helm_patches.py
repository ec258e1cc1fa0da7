"""The places where a plain `helm-run` is touched, and what keeps that safe.

- `Executor.execute` announces the run's requests to the service and then runs as HELM wrote it. HELM's executor
  hands a client one request a thread and knows neither batches nor the run's directory.
- `Runner.run_one` gets our metric appended and a record of its run. While it runs, HELM's file writer replaces
  files whole, and takes away the run's last file before it writes the first, so that a run that was killed between
  two files does not look complete to `--skip-completed-runs`.
- `AdapterFactory.get_adapter` lets an adapter spec bring its own adapter, because HELM knows adapters by a closed
  list of methods.

All of this is HELM's private API. Where it looks different, one warning is given and HELM runs untouched: questions
are then gathered by the service's idle flush, only the statistics and `flexgen_run.json` are missing.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from helm.benchmark import runner as helm_runner
from helm.benchmark.adaptation.adapter_spec import AdapterSpec
from helm.benchmark.adaptation.adapters.adapter_factory import AdapterFactory
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import Executor
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner
from helm.benchmark.window_services.tokenizer_service import TokenizerService
from helm.common.hierarchical_logger import hwarn
from helm.common.object_spec import get_class_by_name
from helm.proxy.retry import NonRetriableException

from flexgen_helm.errors import FlexgenError
from flexgen_helm.files import replace_text
from flexgen_helm.plugin import interrupt, models, registration
from flexgen_helm.plugin.run_record import RunRecord, announce_record, current_run
from flexgen_helm.plugin.service import SubmittedBlock, get_service

FIRST_FILE, LAST_FILE = "run_spec.json", "per_instance_stats.json"
_EXPECTED = {
    "Runner.run_one": (lambda: Runner.run_one, ["self", "run_spec"]),
    "Runner._get_run_path": (lambda: Runner._get_run_path, ["self", "run_spec"]),
    "runner.write": (lambda: helm_runner.write, ["file_path", "content"]),
    "AdapterFactory.get_adapter": (lambda: AdapterFactory.get_adapter, ["adapter_spec", "tokenizer_service"]),
    # A decorator hides the names of its parameters; they are checked when it is called.
    "Executor.execute": (lambda: Executor.execute, None),
}
_warned: set[str] = set()


def install() -> None:
    """Wrap HELM's functions once; change nothing where one of them is not the known one."""
    if getattr(Executor.execute, "flexgen_helm", False):
        return
    for name, (find, parameters) in _EXPECTED.items():
        try:
            found = find()
            if parameters is not None and list(inspect.signature(found).parameters) != parameters:
                raise TypeError(f"takes {inspect.signature(found)}")
        except (AttributeError, TypeError, ValueError) as error:
            _fall_back(f"{name}: {error}")
            return
    Executor.execute = _announcing(Executor.execute)  # type: ignore[method-assign]
    Runner.run_one = _recording(Runner.run_one)  # type: ignore[method-assign]
    helm_runner.write = _completing(helm_runner.write)  # type: ignore[assignment]
    AdapterFactory.get_adapter = staticmethod(_adapting(AdapterFactory.get_adapter))  # type: ignore[method-assign]


def _fall_back(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        interrupt.install()  # otherwise done when a run announces itself
        hwarn(f"flexgen_helm does not know this version of HELM ({reason}): batches are formed by waiting briefly")


def _announcing(original: Callable[..., ScenarioState]) -> Callable[..., ScenarioState]:
    @wraps(original)
    def execute(self: Executor, *args: Any, **kwargs: Any) -> ScenarioState:
        block = announce(self, *args, **kwargs)
        if block is None:
            return original(self, *args, **kwargs)
        service, record = get_service(), current_run.get()
        with block:
            if record is not None:
                record.execute_started = time.monotonic()
                import_classes(record.metric_classes)
            state = original(self, *args, **kwargs)
            if record is not None:
                record.execute_ended = time.monotonic()
                record.load_s = service.loading_s(record.model, record.execute_started or record.execute_ended)
                record.keys, record.answers = block.keys, block.answers()
                record.fingerprint = service.fingerprint(record.model)
                computed = any(not answer.reused for answer in record.answers.values())
                record.engine = service.usage(record.model) if computed else {}
                announce_record(record)
        return state

    execute.flexgen_helm = True  # type: ignore[attr-defined]
    return execute


def announce(executor: Executor, *args: Any, hold: bool = False, **kwargs: Any) -> SubmittedBlock | None:
    """Queue all requests of a scenario state; None where they are not ours or nothing is to be executed.

    hold: do not compute them before `Service.flush`.
    """
    state = args[0] if args else kwargs.get("scenario_state")
    if not isinstance(state, ScenarioState) or not hasattr(executor, "execution_spec"):
        _fall_back("Executor.execute: other arguments")
        return None
    spec = executor.execution_spec
    if spec.dry_run or spec.url:
        return None
    try:
        model = registration.model_of(state.adapter_spec.model_deployment)
        if model is None:
            return None
        tokenizer, positions = models.tokenizer(model), models.facts(model).max_positions
    except (FlexgenError, ValueError):
        return None  # the client says the same, where HELM reports it

    from flexgen_helm.plugin.convert import to_generation_request

    questions = []
    for request_state in state.request_states:
        try:
            questions.append(to_generation_request(request_state.request, tokenizer, positions))
        except NonRetriableException:
            continue  # this request fails alone, when its turn comes
    interrupt.install()
    if not hold:
        get_service().resume()
    durable = bool(spec.sqlite_cache_backend_config or spec.mongo_cache_backend_config)
    return get_service().submit(model, questions, durable, hold)


def _recording(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def run_one(self: Runner, run_spec: RunSpec) -> None:
        model = None if self.dry_run or self.executor.execution_spec.url else model_of(run_spec)
        if model is None:
            return original(self, run_spec)
        from flexgen_helm.plugin.metrics import metric_spec

        record = RunRecord(run_spec.name, Path(self._get_run_path(run_spec)), model, metric_classes(run_spec))
        if not (self.skip_completed_runs or self.cache_instances_only):  # else nothing may be asked
            get_service().preload(model)
        token = current_run.set(record)
        try:
            original(self, replace(run_spec, metric_specs=[*run_spec.metric_specs, metric_spec()]))
        finally:
            current_run.reset(token)

    return run_one


def metric_classes(run_spec: RunSpec) -> list[str]:
    return [spec.class_name for spec in run_spec.metric_specs]


def import_classes(names: Iterable[str]) -> None:
    """What HELM would import when it comes to the metrics (scikit-learn, NLTK: seconds): here it goes on while the
    engine's thread loads the model. What cannot be imported is HELM's to report."""
    for name in dict.fromkeys(names):
        with suppress(Exception):
            get_class_by_name(name)


def model_of(run_spec: RunSpec) -> models.ModelArguments | None:
    """The model of a run, None where it is not ours or cannot be found."""
    try:
        return registration.model_of(run_spec.adapter_spec.model_deployment)
    except (FlexgenError, ValueError):
        return None  # HELM meets the same error inside, where it reports it


def _completing(original: Callable[[str, str], None]) -> Callable[[str, str], None]:
    @wraps(original)
    def write(file_path: str, content: str) -> None:
        record, path = current_run.get(), Path(file_path)
        if record is None or path.parent != record.directory:
            return original(file_path, content)
        if path.name == FIRST_FILE:
            (path.parent / LAST_FILE).unlink(missing_ok=True)
        if path.name == LAST_FILE:
            record.write()
        replace_text(path, content)

    return write


def _adapting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_adapter(adapter_spec: AdapterSpec, tokenizer_service: TokenizerService) -> Any:
        record = current_run.get()
        if record is not None and record.adapt_started is None:
            record.adapt_started = time.monotonic()
        # HELM's specs have no such function; those of `flexgen_helm.scenarios.adapters` do.
        make = getattr(adapter_spec, "make_adapter", None)
        return original(adapter_spec, tokenizer_service) if make is None else make(tokenizer_service)

    return get_adapter
