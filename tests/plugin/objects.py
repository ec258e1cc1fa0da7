"""HELM's records as its executor makes them."""

from dataclasses import replace

from helm.benchmark.adaptation.adapter_spec import AdapterSpec
from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import ExecutionSpec
from helm.benchmark.scenarios.scenario import Input, Instance
from helm.common.authentication import Authentication
from helm.common.cache_backend_config import SqliteCacheBackendConfig


def execution(tmp_path, **changes):
    cache = SqliteCacheBackendConfig(str(tmp_path))
    spec = ExecutionSpec(
        None, Authentication(""), str(tmp_path / "prod_env"), 4, sqlite_cache_backend_config=cache
    )
    return replace(spec, **changes)


def state(*requests, deployment=None):
    deployment = deployment or requests[0].model_deployment
    states = [
        RequestState(
            Instance(Input(str(i)), [], id=str(i)), None, None, 0, None, request, None, 0, False
        )
        for i, request in enumerate(requests)
    ]
    return ScenarioState(AdapterSpec(model=deployment, model_deployment=deployment), states)
