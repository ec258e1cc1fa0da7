"""What PyTorch keeps for the process or thread and products depend on: fixed while an engine opens or runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute in float32 on the host by default, without autocast, inference mode or reduced precision."""
    import torch

    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        if dtype != torch.float32:  # not always: another thread may set it for a model that it loads
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if precision != "highest":
            stack.callback(torch.set_float32_matmul_precision, precision)
            torch.set_float32_matmul_precision("highest")  # of accelerators, too
        if torch.get_default_device().type != "cpu":  # a mode slows every call
            stack.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():  # its tensors are of no use outside
            stack.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
