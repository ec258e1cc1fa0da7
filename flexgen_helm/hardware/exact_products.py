"""PyTorch's settings that change products, fixed while an engine opens or runs.

No torch at import.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

_lock = threading.Lock()
_num_computing = 0  # engines that are opening or running now
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


class _ProductSettings(NamedTuple):
    """PyTorch's settings as a program has made them.

    precisions: of products in float32, for cuda and mkldnn.
    cuda: values of `_CUDA_SETTINGS`, in that order.
    """

    dtype: Any
    precisions: tuple[str, str]
    cuda: tuple[Any, ...]

    @classmethod
    def read(cls) -> _ProductSettings:
        import torch

        backends = torch.backends
        # The level itself cannot be read where a program has set the precision of one of them.
        precisions = (
            backends.cuda.matmul.fp32_precision,
            backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        )
        cuda = [attrgetter(f"{library}.{name}")(backends) for library, name, _ in _CUDA_SETTINGS]
        return cls(torch.get_default_dtype(), precisions, tuple(cuda))

    def make_exact(self) -> None:
        """Replace what is not exact of these settings, which are PyTorch's now."""
        import torch

        _set_cuda([exact for _, _, exact in _CUDA_SETTINGS])
        # not always: another thread may set it for a model that it loads
        if self.dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
        if not _EXACT.issuperset(self.precisions):
            torch.set_float32_matmul_precision("highest")  # of both, and the level

    def restore(self) -> None:
        """Undo `make_exact`."""
        import torch

        _set_cuda(self.cuda)
        if self.dtype != torch.float32:
            torch.set_default_dtype(self.dtype)
        if not _EXACT.issuperset(self.precisions):
            torch.set_float32_matmul_precision(_LEVELS.get(self.precisions, "highest"))
            for library, precision in zip(("cuda", "mkldnn"), self.precisions):
                getattr(torch.backends, library).matmul.fp32_precision = precision


# The program's settings, read before the first of `_num_computing` engines replaced them.
_settings_before: _ProductSettings


def _set_cuda(values: Iterable[Any]) -> None:
    import torch

    for (library, name, _), value in zip(_CUDA_SETTINGS, values):
        setattr(attrgetter(library)(torch.backends), name, value)


@contextmanager
def _exact_process() -> Iterator[None]:
    """Make the settings exact that all threads share, until the last of the engines that compute
    at once ends.
    """
    global _num_computing, _settings_before
    with _lock:
        settings = _ProductSettings.read()
        if not _num_computing:
            _settings_before = settings
        _num_computing += 1
        settings.make_exact()  # by every engine: the program may have set something meanwhile
    try:
        yield
    finally:
        with _lock:
            _num_computing -= 1
            if not _num_computing:
                _settings_before.restore()


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
