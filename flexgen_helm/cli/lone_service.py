"""The service of `flexgen-helm verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flexgen_helm.errors import FlexgenError
from flexgen_helm.request import GenerationRequest, GenerationResult
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import KeyedRequest, Response, Service, SubmittedBlock

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine


class LoneService(Service):
    """Computes each request alone, in the caller's thread and without the response cache, and keeps
    what was asked.

    answers: requests and results by key; what is there is not computed.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(EngineLoader())
        self._only_engine = engine
        self.interrupt()  # nothing is preloaded
        self.answers: dict[str, tuple[GenerationRequest, GenerationResult]] = {}

    def submit(
        self, model: ModelArguments, requests: Sequence[KeyedRequest], *_: Any, **settings: Any
    ) -> SubmittedBlock:
        """Return an empty block: `respond` computes."""
        return SubmittedBlock(self, model, (), [])

    def respond(
        self, model: ModelArguments, request: KeyedRequest, use_cache: bool = True
    ) -> Response:
        """Raises `FlexgenError` for a request that fails."""
        if request.key not in self.answers:
            (result,) = self._only_engine.run([request.request])
            if result.error is not None:
                raise FlexgenError(f"an answer cannot be computed by {model.path}: {result.error}")
            self.answers[request.key] = request.request, result
        return Response(self.answers[request.key][1], is_cached=False)
