"""HELM's Tokenizer over ours. It keeps nothing on disk: HELM's own adapter writes an SQLite row per string."""

from __future__ import annotations

from helm.benchmark.window_services.local_window_service import LocalWindowService
from helm.common.tokenization_request import (
    DecodeRequest,
    DecodeRequestResult,
    TokenizationRequest,
    TokenizationRequestResult,
    TokenizationToken,
)
from helm.proxy.retry import NonRetriableException
from helm.tokenizers.tokenizer import Tokenizer

from flexgen_helm.errors import RequestError
from flexgen_helm.plugin import models, registration


class FlexgenTokenizer(Tokenizer):
    """Same ids and texts as HELM's HuggingFaceTokenizer, no special tokens added, special texts parsed."""

    def __init__(self, tokenizer_name: str) -> None:
        self._tokenizer = models.tokenizer(registration.model_of_tokenizer(tokenizer_name))
        # A sentencepiece vocabulary puts a space before a text; to decode a text is to take it away again.
        ids = self._tokenizer.encode("a", add_special_tokens=False)
        self._prefix_space = self._tokenizer.decode(ids) == " a"

    def tokenize(self, request: TokenizationRequest) -> TokenizationRequestResult:
        try:
            ids = list(self._tokenizer.encode(request.text, add_special_tokens=False))
        except RequestError as error:  # HELM would retry it
            raise NonRetriableException(str(error)) from error
        if request.truncation:
            ids = ids[: max(request.max_length, 0)]
        values = ids if request.encode else self._tokenizer.token_texts(ids)
        return TokenizationRequestResult(
            success=True,
            cached=False,
            text=request.text,
            tokens=[TokenizationToken(value) for value in values],
            request_time=0.0,
        )

    def decode(self, request: DecodeRequest) -> DecodeRequestResult:
        text = self._tokenizer.decode(request.tokens)
        if self._prefix_space:
            text = text.removeprefix(" ")
        return DecodeRequestResult(success=True, cached=False, text=text, request_time=0.0)


class FlexgenWindowService(LocalWindowService):
    """HELM's window arithmetic, which knows no BOS: where the model gets one, its place is reserved.

    Language modelling does not come through here: it fills whole windows and puts the prefix token itself.
    """

    def _reserved(self, text: str) -> int:
        tokenizer = models.tokenizer(registration.model_of_tokenizer(self.tokenizer_name))
        if not tokenizer.adds_bos or tokenizer.bos_id is None:
            return 0
        return int(list(tokenizer.encode(text, add_special_tokens=False)[:1]) != [tokenizer.bos_id])

    def fits_within_context_window(self, text: str, expected_completion_token_length: int = 0) -> bool:
        return super().fits_within_context_window(text, expected_completion_token_length + self._reserved(text))

    def truncate_from_right(self, text: str, expected_completion_token_length: int = 0) -> str:
        # The inherited loop asks `fits_within_context_window`, which reserves the place again by itself.
        max_length = self.max_request_length - expected_completion_token_length - self._reserved(text)
        result = self.decode(self.encode(text, truncation=True, max_length=max_length).tokens)
        while not self.fits_within_context_window(result, expected_completion_token_length):
            result = result[:-1]
        return result
