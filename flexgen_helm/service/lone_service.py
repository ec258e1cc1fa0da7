"""Recorded answers that are computed again, each request alone, by the code of the harness that recorded them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexgen_helm.errors import UsageError
from flexgen_helm.progress import silenced
from flexgen_helm.request import GenerationRequest, GenerationResult
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import KeyedRequest, Response, Service, SubmittedBlock

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine


class LoneService(Service):
    """Computes each request alone. It has no thread, no queue, and no response cache.

    answers: requests and results by key; what is there is not computed.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        super().__init__(EngineLoader())
        self.engine = engine
        self.answers: dict[str, tuple[GenerationRequest, GenerationResult]] = {}

    def submit(
        self, model: ModelArguments, requests: Sequence[KeyedRequest], *args: object, **kwargs: object
    ) -> SubmittedBlock:
        return SubmittedBlock(self, model, requests, [])

    def respond(self, model: ModelArguments, request: KeyedRequest, use_cache: bool = True) -> Response:
        """Raises `UsageError` for a request that fails."""
        if request.key not in self.answers:
            assert self.engine is not None
            with silenced():
                (result,) = self.engine.run([request.request])
            if result.error is not None:
                raise UsageError(f"an answer cannot be computed by {model.path}: {result.error}")
            self.answers[request.key] = request.request, result
        return Response(self.answers[request.key][1], is_cached=False)


@dataclass(frozen=True)
class RecordedAnswer:
    """An answer in a file, of one request or several.

    recorded: what is compared, as values of JSON. has_sums: its numbers are sums of log-probabilities.
    recompute: returns the same of the answers of a service; it is given the service and the model.
    """

    name: str
    recorded: Any
    recompute: Callable[[LoneService, ModelArguments], Any]
    has_sums: bool = False
