"""How the service gets an engine: in this process, or on the workers of a Ray cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flexgen_helm.checkpoint import names, suffixes
from flexgen_helm.concurrency import import_lock
from flexgen_helm.service.models import ModelArguments

if TYPE_CHECKING:
    from flexgen_helm.distributed.engine import ClusterEngine
    from flexgen_helm.distributed.ray_cluster import RaySession
    from flexgen_helm.engine.engine import Engine


class EngineLoader:
    """Loads engines in this process; `ClusterLoader` on other machines, and tests give fakes."""

    def import_modules(self, model: ModelArguments) -> None:
        """Import what an engine of `model` needs, in the calling thread and under the import lock.

        SciPy (which a search and metrics need) and `transformers` have modules that import one
        another; where two threads import them at once, one gets an unfinished module.
        """
        with import_lock(
            "scipy.optimize", "flexgen_helm.engine.engine", "flexgen_helm.response_cache"
        ):
            # GGUF files contain their tokenizer.
            if names.resolve(model.path, model.revision).kind not in ("gguf", "wheel"):
                from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    def load(self, model: ModelArguments) -> Engine:
        """Return an engine that has loaded the model, to be closed by the caller."""
        self.import_modules(model)
        from flexgen_helm.engine.engine import Engine

        return Engine.from_config(
            model.path, model.engine_key.config, name=suffixes.base_name(model.name)
        )

    def fingerprint(self, model: ModelArguments) -> str | None:
        """Return the fingerprint of the engine that `load` returns; None where only the engine
        knows.
        """
        from flexgen_helm.engine.fingerprint import quick_engine_fingerprint

        config = model.engine_key.config
        if (known := quick_engine_fingerprint(model.path, config)) is not None:
            return known
        self.import_modules(model)
        from flexgen_helm.engine.opening import fingerprint_before_loading

        return fingerprint_before_loading(model.path, config)

    def close(self) -> None:
        """Release what engines share; they are closed before."""


class ClusterLoader(EngineLoader):
    """Loads models on the workers of a Ray cluster, which all models of a suite share."""

    def __init__(self, session: RaySession) -> None:
        self._session = session

    def load(self, model: ModelArguments) -> ClusterEngine:  # type: ignore[override]
        """Start workers, and wait until one has loaded the model."""
        self.import_modules(model)
        from flexgen_helm.distributed.engine import ClusterEngine
        from flexgen_helm.distributed.worker import ModelToLoad

        self._session.connect()
        config = model.engine_key.config
        config = replace(config, device=self._session.device(config.device))
        to_load = ModelToLoad(
            model.path, config, suffixes.base_name(model.name)
        ).with_absolute_paths()
        return ClusterEngine(to_load, self._session)

    def fingerprint(self, model: ModelArguments) -> None:
        """Return None: workers say what they compute with once they have loaded it."""

    def close(self) -> None:
        self._session.close()
