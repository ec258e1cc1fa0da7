"""How the service gets an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexgen_helm.concurrency import import_lock
from flexgen_helm.plugin.models import ModelArguments

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine


class EngineLoader:
    """Loads engines of `flexgen_helm.engine`; tests give the service another one."""

    def import_modules(self, model: ModelArguments) -> None:
        """Import what an engine of `model` needs, in the calling thread and under the import lock.

        SciPy (which a search and HELM's metrics need) and `transformers` have modules that import each other: where
        two threads import them at once, one gets an unfinished module.
        """
        from flexgen_helm.checkpoint import names

        with import_lock("scipy.optimize", "flexgen_helm.engine.engine", "flexgen_helm.response_cache"):
            if names.resolve(model.path, model.revision).kind not in ("gguf", "wheel"):  # these bring their tokenizer
                from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    def load(self, model: ModelArguments) -> Engine:
        self.import_modules(model)
        from flexgen_helm.engine.engine import Engine

        return Engine.from_config(model.path, model.config)
