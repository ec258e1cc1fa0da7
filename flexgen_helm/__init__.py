"""Large language models under HELM on a machine too small for them.

The public names are loaded on first use, so that registration, `--help` and planning stay free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Engine": "flexgen_helm.exec.engine",
    "Policy": "flexgen_helm.policy.policy",
    "GenerationRequest": "flexgen_helm.core.records",
    "GenerationResult": "flexgen_helm.core.records",
    "Completion": "flexgen_helm.core.records",
    "MemoryLimits": "flexgen_helm.core.records",
    "FlexgenError": "flexgen_helm.core.errors",
}
__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from flexgen_helm.core.errors import FlexgenError
    from flexgen_helm.core.records import Completion, GenerationRequest, GenerationResult, MemoryLimits
    from flexgen_helm.exec.engine import Engine
    from flexgen_helm.policy.policy import Policy


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
