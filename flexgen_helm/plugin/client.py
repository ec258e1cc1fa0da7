"""The HELM client: a thin door to the process-wide service. HELM makes one for every thread that asks early."""

from __future__ import annotations

from typing import Any

from helm.clients.client import Client
from helm.common.cache import BlackHoleCacheConfig, CacheConfig
from helm.common.request import Request, RequestResult
from helm.proxy.retry import NonRetriableException

from flexgen_helm.plugin import convert, models
from flexgen_helm.plugin.service import get_service


class FlexgenClient(Client):
    """Arguments beside the first two are those of a deployment entry, all optional: see `models.ModelArguments`."""

    def __init__(self, model_name: str, cache_config: CacheConfig | None = None, **arguments: Any) -> None:
        self.model = models.find_model(model_name, arguments)
        # `--disable-cache` shows here and nowhere else. HELM's own cache is never used: its key knows only the name.
        self.durable = not isinstance(cache_config, BlackHoleCacheConfig)

    def make_request(self, request: Request) -> RequestResult:
        """Answer, or fail in one sentence; only this request fails, and nothing is retried in vain.

        Raises NonRetriableException for fields that the engine cannot honour.
        """
        if request.embedding:
            return convert.no_embedding()
        try:
            tokenizer = models.tokenizer(self.model)
            question = convert.to_generation_request(request, tokenizer, models.facts(self.model).max_positions)
            answer = get_service().answer(self.model, question, self.durable)
            return convert.to_request_result(request, question, answer.result, answer.reused, tokenizer)
        except NonRetriableException:
            raise
        except Exception as error:  # HELM would retry it for 150 seconds
            return convert.failed_result(convert.describe_error(error))
