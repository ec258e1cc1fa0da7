"""The HELM client. HELM makes one for every thread that asks early; all share the service of the
process.
"""

from __future__ import annotations

from typing import Any

from helm.clients.client import Client
from helm.common.cache import BlackHoleCacheConfig, CacheConfig
from helm.common.request import EMBEDDING_UNAVAILABLE_REQUEST_RESULT, Request, RequestResult
from helm.proxy.retry import NonRetriableException

from flexgen_helm.plugin import convert
from flexgen_helm.plugin.context import get_context
from flexgen_helm.system_errors import explain


class FlexgenClient(Client):
    """HELM's client for `flexgen/…` models and deployments with a checkpoint of one's own.

    arguments: those of a deployment entry, all optional; see `model_names.find_model`.
    """

    def __init__(
        self, model_name: str, cache_config: CacheConfig | None = None, **arguments: Any
    ) -> None:
        self.model = get_context().find_model(model_name, arguments)
        # `--disable-cache` shows here and nowhere else. HELM's own cache is never used: its key
        # knows only the name.
        self.use_cache = not isinstance(cache_config, BlackHoleCacheConfig)

    def make_request(self, request: Request) -> RequestResult:
        """Return the result; a request that fails, fails alone and is not retried.

        Raises `NonRetriableException` for a field that is not supported.
        """
        if request.embedding:
            return convert.failed_result(
                EMBEDDING_UNAVAILABLE_REQUEST_RESULT.error or "no embeddings"
            )
        context = get_context()
        try:
            helm_request = convert.to_helm_request(request, self.model, context.models)
            response = context.service.respond(self.model, helm_request, self.use_cache)
            encoder = context.models.encoder(self.model)
            return convert.to_request_result(
                request, helm_request, response.result, response.is_cached, encoder
            )
        except NonRetriableException:
            raise
        except Exception as error:  # HELM would retry it for 150 seconds
            return convert.failed_result(explain(error))
