"""Copies in pieces: what is larger than a buffer arrives whole, whatever its layout."""

import pytest
import torch

from flexgen_helm import Engine
from flexgen_helm.offload import copy_engine
from flexgen_helm.offload.copy_engine import CudaCopyEngine
from tests.cuda.engine_runs import LIMITS


@pytest.mark.parametrize("buffer", [64, 700, 1 << 20])
@pytest.mark.parametrize("view", ["whole", "strided", "transposed"])
def test_what_exceeds_a_buffer_crosses_in_pieces(cuda_device, monkeypatch, buffer, view):
    """Rows that are longer than the buffer are divided too."""
    monkeypatch.setattr(copy_engine, "COPY_BUFFER_BYTES", buffer)
    engine, memory = CudaCopyEngine(torch.device("cuda")), torch.arange(6.0 * 10 * 8).view(6, 10, 8)
    source = {"whole": memory, "strided": memory[:, 2:9], "transposed": memory.transpose(0, 1)}[
        view
    ]
    on_device = engine.to_device(source)
    assert torch.equal(on_device.cpu(), source)
    assert torch.equal(engine.to_host(on_device), source)
    into = torch.zeros(2, *source.shape).transpose(1, 2)[1].transpose(0, 1)
    assert torch.equal(engine.to_host(on_device, into), source)
    rows = torch.tensor([5, 0, 5, 3])
    assert torch.equal(engine.rows_to_device(memory, rows).cpu(), memory[rows])


@pytest.mark.fast(1)
@pytest.mark.parametrize("precision", ["fp16", "4bit"])
def test_resident_weights_cross_through_a_pinned_buffer(tiny, tmp_path, cuda_device, precision):
    """Whole matrices in new memory would cost as much time as reading them."""
    settings = dict(device="cuda", precision=precision, limits=LIMITS, offload_dir=tmp_path)
    with Engine.from_pretrained(tiny("llama").path, **settings):
        assert not [line for line in cuda_device.pageable_copies if line.startswith("offload/")]


def test_a_refused_registration_does_not_poison_the_next_launch(cuda_device):
    """Its error stays the thread's last one until a launch reports it."""
    cuda_device.register_error = 2
    torch.cuda.cudart().cudaHostRegister(0, 4096, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.ones(1, device="cuda")  # the device as it is
    engine = CudaCopyEngine(torch.device("cuda"))
    engine.host_memory(4096)
    assert not engine.pins and torch.ones(1, device="cuda").item() == 1
