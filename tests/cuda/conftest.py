"""Fixtures for tests on the CUDA device in host memory."""

from dataclasses import replace

import pytest

from flexgen_helm.quant import precisions
from flexgen_helm.quant.precisions import PRECISIONS
from tests.cuda.device import cuda_in_host_memory
from tests.helpers.packed_caches import FORMATS


@pytest.fixture
def cuda_device():
    """A CUDA device in host memory; at the end no race and no mix may have been seen."""
    with cuda_in_host_memory() as device:
        yield device
    device.check()


@pytest.fixture(autouse=True)
def a_machine_with_a_gpu(monkeypatch):
    """A machine without one is refused for `cuda`."""
    monkeypatch.setenv("FLEXGEN_HELM_HARDWARE", "t4")


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Groups and residual windows of packed caches so small that tiny prompts and short answers
    fill some.
    """
    monkeypatch.setattr(precisions, "_PLAIN_GROUP", 16)
    for name, fmt in (("4bit", "channels"), ("4bit-s", "sparse channels"), ("fp16-s", "sparse")):
        monkeypatch.setitem(PRECISIONS, name, replace(PRECISIONS[name], cache=FORMATS[fmt]))
