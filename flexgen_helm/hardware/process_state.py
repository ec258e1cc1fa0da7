"""What PyTorch keeps for the process or thread and products depend on: fixed while an engine opens or runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from flexgen_helm.progress import Message, report


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


# The rank of this process in a pipeline that `torchrun` started, from its environment. No torch.


@dataclass(frozen=True)
class Rank:
    """One process of several.

    number, size: of all processes; local_number, local_size: of those on this machine.
    """

    number: int
    size: int
    local_number: int
    local_size: int


def rank_of_process() -> Rank | None:
    """Return the rank that torchrun has given to this process; None where it is the only one."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(os.environ.get(name, "").isdecimal() for name in names):
        return None
    rank = Rank(*(int(os.environ[name]) for name in names))
    return rank if rank.size > 1 else None


# Fast paths of a GPU, by name: which of them this process leaves, and why. Slower ones give the same numbers.

PLAIN = "plain PyTorch"
# In the order in which they are tried: each on top of those before it.
ATTENTION, REGISTERED, COPIES, GRAPHS, TRITON, HALVES = FAST_PATHS = (
    "fused attention",
    "registered memory",
    "background copies",
    "CUDA graphs",
    "Triton kernels",
    "16-bit products",
)
_INSTEAD = {
    ATTENTION: "attention is its formula",
    REGISTERED: "host memory stays pageable",
    COPIES: "products wait for copies",
    GRAPHS: "kernels are launched one by one",
    TRITON: "plain PyTorch dequantizes packed weights",
    HALVES: "products are in float32",
}
# Name -> why it is not used in this process.
switched_off: dict[str, str] = {}


def switch_off(name: str, reason: str) -> None:
    """Leave a fast path in this process, after one sentence."""
    if switched_off.setdefault(name, reason) is reason:
        report(Message(f"no {name} on this device, so {_INSTEAD[name]}, which is slower ({reason})"))
