"""The flags of `flexgen-helm run` for several machines, refused before anything long begins."""

import os

import pytest

from flexgen_helm import cli
from flexgen_helm.distributed import ray_cluster
from tests.helpers.flags import record_suites

RUN = ["run", "-r", "simple_mcqa:model=flexgen/opt-125m", "-m", "1"]


@pytest.mark.parametrize(
    "flags, installed, sentence",
    [
        (
            ["--ray", "auto"],
            False,
            "--ray needs Ray, which is not installed here; run: pip install 'flexgen-helm[ray]'",
        ),
        (
            ["--ray-workers", "2"],
            True,
            "--ray-workers and --ray-cores need --ray; write for example --ray auto",
        ),
        (
            ["--ray", "local"],
            True,
            "(TMPDIR), whose name is 1 bytes too long for that; run: export RAY_TMPDIR=/tmp",
        ),
        (["--ray-worker", "2"], True, "run has no flag --ray-worker; did you mean --ray-workers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    flags,
    installed,
    sentence,
    monkeypatch,
    capsys,
):
    calls = record_suites(monkeypatch)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/".ljust(47 - len(str(os.getpid())), "t"))
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: object() if installed else None)
    assert cli.main([*RUN, *flags]) == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert calls == []


def test_a_gpu_of_other_machines_need_not_be_here(monkeypatch):
    """Neither the device nor the offload folder is this machine's."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    calls = record_suites(monkeypatch)
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: object())
    monkeypatch.setattr(ray_cluster.RaySession, "connect_soon", lambda session: None)
    flags = ["--device", "cuda", "--offload-dir", "/proc/not/here"]
    assert cli.main([*RUN, *flags]) == 2 and calls == []
    assert cli.main([*RUN, *flags, "--ray", "auto"]) == 0 and len(calls) == 1
