"""The device that computes, the copies to and from it, and the type of its products."""

from __future__ import annotations

import torch

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.engine.rank import Rank
from flexgen_helm.errors import UsageError
from flexgen_helm.hardware.processor import processor_name
from flexgen_helm.models.architectures import overflows_float16
from flexgen_helm.offload.copy_engine import CopyEngine, CudaCopyEngine, SimulatedCopyEngine


def open_device(
    name: str, link_gb_s: tuple[float, float] | None, rank: Rank
) -> tuple[torch.device, CopyEngine | None]:
    """Return the compute device and its copy engine; None where the host computes.

    rank: where there are several, each on a machine takes a GPU of its own.
    """
    if name == "sim":
        return compute_device(name), SimulatedCopyEngine(*(link_gb_s or (None, None)))
    device = compute_device(name)
    if device.type == "cpu":
        return device, None
    if not torch.cuda.is_available():
        raise UsageError(
            f"device {name!r} was asked for and this machine has no usable GPU; take --device cpu"
        )
    if rank.size > 1:
        if rank.local_size > torch.cuda.device_count():
            raise UsageError(
                f"{rank.local_size} processes were started on a machine with "
                f"{torch.cuda.device_count()} GPUs; start one for each GPU, or take --device cpu"
            )
        device = torch.device("cuda", rank.local_number)
    return device, CudaCopyEngine(device)


def compute_device(name: str) -> torch.device:
    """Return the device that an option names, which may not be here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cpu" if name == "sim" else name)


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or processor that computes."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def read_as_float16_if_faster(device: torch.device, checkpoint: Checkpoint) -> str:
    """Let a bfloat16 checkpoint be read as float16 if the GPU has no bfloat16 products.

    Return why it must not be, where the model is what keeps it from that; "" otherwise.
    Such GPUs (compute capability below 8.0, as the T4) multiply float16 eight times as fast as
    float32.
    """
    is_cuda = device.type == "cuda" and torch.version.hip is None
    if (
        not is_cuda
        or checkpoint.storage_dtype != torch.bfloat16
        or torch.cuda.get_device_capability(device) >= (8, 0)
    ):
        return ""
    architecture = checkpoint.config.architecture
    if overflows_float16(architecture):
        return (
            f"the GPU has no bfloat16 products, and hidden states of {architecture} exceed float16"
        )
    checkpoint.read_as_float16(True)
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without PyTorch's prefix, as `float16`."""
    return str(dtype).removeprefix("torch.")


def dtype_reason(device: torch.device, dtype: torch.dtype, checkpoint: Checkpoint) -> str:
    """Say why products are in `dtype`, where nothing stood in the way."""
    if checkpoint.as_float16 and dtype == torch.float16:
        return (
            "the GPU has no bfloat16 products, and float16 has the values of these bfloat16 weights"
        )
    if dtype == checkpoint.storage_dtype:
        return "the type of the weights"
    if device.type == "cpu":
        return "the precision that is promised for CPUs"
    return "measured to be faster than the type of the weights"
