"""Fast paths of a GPU that were wrong or failed in this process, which leaves them from then on.

Slower ones give the same numbers. No torch.
"""

from __future__ import annotations

from flexgen_helm.progress import Message, report

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
