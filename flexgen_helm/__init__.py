"""Large language models under HELM on a machine too small for them.

The public names are loaded on first use, so that registration, `--help` and planning stay free of
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_EXPORTS = {
    "Engine": "flexgen_helm.engine.engine",
    "EngineConfig": "flexgen_helm.config",
    "Policy": "flexgen_helm.planner.policy",
    "GenerationRequest": "flexgen_helm.request",
    "GenerationResult": "flexgen_helm.request",
    "Completion": "flexgen_helm.request",
    "Score": "flexgen_helm.engine.scoring",
    "MemoryLimits": "flexgen_helm.tiers",
    "FlexgenError": "flexgen_helm.errors",
}
__all__ = [*_EXPORTS, "__version__"]

if TYPE_CHECKING:
    from flexgen_helm.config import EngineConfig
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.engine.scoring import Score
    from flexgen_helm.errors import FlexgenError
    from flexgen_helm.planner.policy import Policy
    from flexgen_helm.request import Completion, GenerationRequest, GenerationResult
    from flexgen_helm.tiers import MemoryLimits


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
