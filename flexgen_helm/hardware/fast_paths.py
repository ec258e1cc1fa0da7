"""Fast paths of a GPU, by name: which of them this process leaves, and why. Slower ones give the same numbers."""

from __future__ import annotations

from flexgen_helm.progress import Message, report

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
