"""The requests of a HELM run, as they are submitted to the service."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from helm.benchmark.adaptation.adapter_spec import AdapterSpec
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import ExecutionSpec, Executor
from helm.proxy.retry import NonRetriableException

from flexgen_helm.errors import FlexgenError
from flexgen_helm.plugin import registration
from flexgen_helm.plugin.context import get_context, interrupt_on_signals
from flexgen_helm.plugin.convert import HelmRequest, may_be_rendered, to_helm_request
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import Service, SubmittedBlock
from flexgen_helm.units import count


class Submission(NamedTuple):
    """The requests of one run.

    instances: HELM's id of the instance, and its split, of each request.
    """

    model: ModelArguments
    requests: Sequence[HelmRequest]
    use_cache: bool
    instances: Sequence[tuple[str, str | None]] = ()

    def submit(self, service: Service) -> SubmittedBlock:
        return service.submit(self.model, self.requests, self.use_cache)


def submission_of(executor: Executor, scenario_state: ScenarioState) -> Submission | None:
    """Return the requests of a scenario state for the service; None if they are not ours or must
    not be executed.

    Says once which prompts go through a chat template and how many are clipped, and has signals end
    the run from here on: requests are ours.
    """
    spec = executor.execution_spec
    model = model_of_adapter(scenario_state.adapter_spec) if is_executed(spec) else None
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
    return Submission(model, requests, uses_cache(spec), instances)


def uses_cache(spec: ExecutionSpec) -> bool:
    """Whether `--disable-cache` was not given."""
    return bool(spec.sqlite_cache_backend_config or spec.mongo_cache_backend_config)


def is_executed(spec: ExecutionSpec) -> bool:
    """Whether requests are computed in this process at all."""
    return not (spec.dry_run or spec.url)


def model_of_adapter(adapter_spec: AdapterSpec) -> ModelArguments | None:
    """Return the model of a run, None if it is not ours or is not found."""
    try:
        return registration.model_of(adapter_spec.model_deployment)
    except (FlexgenError, ValueError):
        return None  # HELM meets the same error where it reports it
