"""Fixtures for tests on the CUDA device in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.device import Device, cuda_in_host_memory


@pytest.fixture
def cuda_device() -> Iterator[Device]:
    """A CUDA device in host memory; at the end no race and no mix may have been seen."""
    with cuda_in_host_memory() as device:
        yield device
    device.check()
