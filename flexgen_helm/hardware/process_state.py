"""What a process has one of, in five sections.

PyTorch's settings: those that change products are fixed while an engine opens or runs.
Rank: which process of a pipeline this is; read from the environment.
Fast paths: those of the GPU that were wrong or failed here, and are left out from then on.
CUDA: whether this machine can have a device, told without importing torch.
Processor: what decides the bits of products on the host.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from flexgen_helm.errors import UsageError
from flexgen_helm.progress import Message, report

_lock = threading.Lock()
_num_computing = 0
_settings_before: tuple[Any, ...] = ()
# What `set_float32_matmul_precision` makes of a level, for cuda and mkldnn.
_LEVELS = {("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}
_EXACT = {"none", "ieee"}
# Settings of CUDA's libraries under `torch.backends`: parts of sums in 16 bits, where one may
# overflow although the sum does not, and convolutions in TF32.
_CUDA_SETTINGS = (
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction", False),
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction", False),
    ("cudnn.conv", "fp32_precision", "ieee"),
    ("cudnn.rnn", "fp32_precision", "ieee"),
)


@contextmanager
def _exact_process() -> Iterator[None]:
    """Set what all threads share: the first engine that computes sets it, the last one puts it
    back.
    """
    import torch

    global _num_computing, _settings_before
    with _lock:
        # The level itself cannot be read where a program has set the precision of one of them.
        products = [library.matmul for library in (torch.backends.cuda, torch.backends.mkldnn)]
        dtype = torch.get_default_dtype()
        precisions = tuple(library.fp32_precision for library in products)
        libraries = [attrgetter(library)(torch.backends) for library, _, _ in _CUDA_SETTINGS]
        if not _num_computing:
            cuda = [
                getattr(library, name) for library, (_, name, _) in zip(libraries, _CUDA_SETTINGS)
            ]
            _settings_before = dtype, precisions, cuda
        _num_computing += 1
        for library, (_, name, exact) in zip(libraries, _CUDA_SETTINGS):
            setattr(library, name, exact)
        # not always: another thread may set it for a model that it loads
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
        if not _EXACT.issuperset(precisions):
            torch.set_float32_matmul_precision("highest")  # of both, and the level
    try:
        yield
    finally:
        with _lock:
            _num_computing -= 1
            dtype, precisions, cuda = _settings_before
            if not _num_computing and dtype != torch.float32:
                torch.set_default_dtype(dtype)
            if not _num_computing and not _EXACT.issuperset(precisions):
                torch.set_float32_matmul_precision(_LEVELS.get(precisions, "highest"))
                for library, precision in zip(products, precisions):
                    library.fp32_precision = precision
            if not _num_computing:
                for library, (_, name, _), before in zip(libraries, _CUDA_SETTINGS, cuda):
                    setattr(library, name, before)


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute in float32 on the host by default, without autocast, inference mode or reduced
    precision.
    """
    import torch

    with ExitStack() as stack:
        stack.enter_context(_exact_process())
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
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(
        os.environ.get(name, "").isdecimal() for name in names
    ):
        return None
    rank = Rank(*(int(os.environ[name]) for name in names))
    return rank if rank.size > 1 else None


# Fast paths of a GPU, by name: which of them this process leaves, and why. Slower ones give the
# same numbers.

ATTENTION, TRITON = "fused attention", "Triton kernels"
_INSTEAD = {
    ATTENTION: "attention is its formula",
    TRITON: "plain PyTorch dequantizes packed weights",
}
# Name -> why it is not used in this process.
switched_off: dict[str, str] = {}


def switch_off(name: str, reason: str) -> None:
    """Leave a fast path in this process, after one sentence."""
    if name not in switched_off:
        switched_off[name] = reason
        report(
            Message(f"no {name} on this device, so {_INSTEAD[name]}, which is slower ({reason})")
        )


# Whether this machine can have a CUDA device, as far as can be told without importing torch.

# Device files of NVIDIA's driver on a PC, under WSL, and on a Jetson.
_DEVICE_FILES = ("nvidia*", "dxg", "nvhost*", "nvgpu*")


def require_cuda(device: str) -> None:
    """Raise `UsageError` if there is certainly no CUDA device; in doubt, torch is asked when a
    model loads.

    device: as the user named it.
    """
    if (reason := why_no_cuda()) is not None:
        raise UsageError(f"device {device!r} was asked for and {reason}; take --device cpu")


def why_no_cuda(devices: Path = Path("/dev")) -> str | None:
    """Say why no CUDA device can be there; None if there may be one."""
    spec = find_spec("torch")
    build = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if build is None or not build.is_file():
        return None
    text = build.read_text(encoding="utf-8")
    cuda, hip = (
        re.search(rf"^{name}\b.*?=\s*(.+)$", text, re.MULTILINE) for name in ("cuda", "hip")
    )
    if cuda is None or hip is None or hip[1].strip() != "None":
        return None  # of another version, or ROCm's, whose devices torch calls cuda too
    if cuda[1].strip() == "None":
        return "this torch is built for CPUs only"
    if _has_driver() or any(any(devices.glob(pattern)) for pattern in _DEVICE_FILES):
        return None
    return "this machine has no NVIDIA driver"


def _has_driver() -> bool:
    """Whether the library that torch's CUDA runtime loads can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def processor_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the vendor of the host's processor and its extensions for vectors and matrices, as
    Linux names them.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        text = ""
    vendor = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(.*)$", text, re.MULTILINE)
    extensions = sorted(set(re.findall(r"\b(?:amx|avx|fma|f16c|asimd|sve)\w*", text)))
    return " ".join((platform.machine(), vendor[1] if vendor else "unknown", *extensions))
