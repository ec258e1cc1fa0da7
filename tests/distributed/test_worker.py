"""What a worker takes of its machine, and what it is sent."""

from __future__ import annotations

import os

import psutil
import pytest

from flexgen_helm import EngineConfig
from flexgen_helm.distributed.worker import (
    ExpectedIdentity,
    ModelToLoad,
    WorkerIdentity,
    leave_threads_to_torch,
    limits_of_share,
)


def test_workers_of_one_machine_divide_its_memory():
    config = EngineConfig(device="cpu")
    limits = limits_of_share(config, 0.25).limits
    assert limits.cpu is not None and limits.disk is not None and limits.gpu is None
    assert limits.cpu <= psutil.virtual_memory().total / 4
    assert limits_of_share(config, 1.0) is config
    given = EngineConfig(device="cpu", limits={"cpu": 10**9})  # type: ignore[arg-type]
    assert limits_of_share(given, 0.25).limits.cpu == 10**9


@pytest.mark.parametrize("set_by, cores, left", [("64", 64, None), ("2", 64, "2"), ("8", 8, "8")])
def test_a_worker_with_the_whole_machine_lets_torch_choose_its_threads(
    monkeypatch, set_by, cores, left
):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setenv("OMP_NUM_THREADS", set_by)
    leave_threads_to_torch(cores)
    assert os.environ.get("OMP_NUM_THREADS") == left


def test_paths_are_absolute_for_other_processes(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    sent = ModelToLoad("mine", EngineConfig(offload_dir="disk"), "mine").with_absolute_paths()
    assert (sent.path, sent.config.offload_dir) == (str(tmp_path / "mine"), str(tmp_path / "disk"))
    assert (
        ModelToLoad("opt-125m", EngineConfig(), "opt-125m").with_absolute_paths().path == "opt-125m"
    )


@pytest.mark.parametrize(
    "version, fingerprint, first, sentence",
    [
        ("2", "a", "a", None),
        ("1", "a", "a", "it has flexgen-helm 1 and the driver has 2; install the same version"),
        ("2", "c", "c", "its weights or tokenizer of tiny, or its transformers, differ"),
        ("2", "b", "a", "in float32 on cpu, and other workers do not, so scores would depend"),
    ],
)
def test_a_worker_that_differs_is_refused(version, fingerprint, first, sentence):
    identity = WorkerIdentity("host", 1, version, fingerprint, "cpu", "float32", 1.0)
    why = ExpectedIdentity(frozenset("ab"), "2").difference(identity, first, "tiny")
    assert why is None if sentence is None else sentence in (why or "")
