"""A Ray cluster of three machines, which are processes here: two join while one computes."""

from __future__ import annotations

import pytest

from flexgen_helm import EngineConfig
from flexgen_helm.distributed.engine import ClusterEngine
from flexgen_helm.distributed.ray_cluster import RayOptions, RaySession
from flexgen_helm.distributed.worker import ModelToLoad
from flexgen_helm.request import GenerationResult
from tests.distributed.test_ray import alone, requests_of, same

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster():
    """A cluster with one machine of one core."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'flexgen-helm[ray]'")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    yield cluster
    cluster.shutdown()


def test_workers_join_while_one_computes_and_a_machine_is_lost(cluster, tiny):
    model = ModelToLoad(str(tiny("llama").path), EngineConfig(device="cpu"), "tiny")
    requests = requests_of(900, max_tokens=32)
    session = RaySession(RayOptions(cluster.address))
    session.connect()
    engine = ClusterEngine(model, session)
    joined: list = []
    lost: list = []

    def on_result(index, result):
        if not joined:
            joined.extend(cluster.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in "ab")
        if len(engine._identities) == 3 and not lost:
            lost.append(joined[0])
            cluster.remove_node(joined[0], allow_graceful=False)

    try:
        assert len(engine._identities) == 1
        results: list[GenerationResult] = []
        for _ in range(30):
            results = engine.run(requests, on_result=on_result)
            if lost:
                break
        same(results, alone(model, requests))
        assert lost and len(engine._identities) >= 3
    finally:
        engine.close()
        session.close()
