"""HELM's Tokenizer and window service over ours. HELM's own adapter writes an SQLite row per
string; ours does not.
"""

from __future__ import annotations

from functools import cached_property

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

from flexgen_helm.errors import RequestError, UsageError
from flexgen_helm.plugin import registration
from flexgen_helm.plugin.context import get_context
from flexgen_helm.service.models import ModelArguments


class FlexgenTokenizer(Tokenizer):
    """Same ids and texts as HELM's HuggingFaceTokenizer; no special tokens are added, special texts
    are parsed.
    """

    def __init__(self, tokenizer_name: str) -> None:
        self._encoder = get_context().models.encoder(
            registration.model_of_tokenizer(tokenizer_name)
        )
        self._tokenizer = self._encoder.tokenizer
        # A sentencepiece vocabulary puts a space in front of a text, and decoding a text takes it
        # away again.
        self._adds_space = self._tokenizer.decode(self._encoder.encode("a")) == " a"

    def tokenize(self, request: TokenizationRequest) -> TokenizationRequestResult:
        try:
            ids = self._encoder.encode(request.text)
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
        if self._adds_space:
            text = text.removeprefix(" ")
        return DecodeRequestResult(success=True, cached=False, text=text, request_time=0.0)


class FlexgenWindowService(LocalWindowService):
    """HELM's window service, which also counts what the client adds to a prompt: BOS, and the
    chat template's tokens.

    Language modelling does without: it fills its windows, and adds the prefix token itself.
    """

    @cached_property
    def _model(self) -> ModelArguments:
        return registration.model_of_tokenizer(self.tokenizer_name)

    def _num_added_tokens(self, text: str, generates: bool) -> int:
        models = get_context().models
        encoder, chat = models.encoder(self._model), models.chat(self._model) if generates else None
        plain_ids = sent_ids = encoder.encode(text)
        if chat is not None and chat.applied:
            sent_ids = encoder.encode(chat.render_prompt(text))
        return len(encoder.context_tokens(sent_ids)) + len(sent_ids) - len(plain_ids)

    def fits_within_context_window(
        self, text: str, expected_completion_token_length: int = 0
    ) -> bool:
        added = self._num_added_tokens(text, expected_completion_token_length > 0)
        return super().fits_within_context_window(text, expected_completion_token_length + added)

    def truncate_from_right(self, text: str, expected_completion_token_length: int = 0) -> str:
        # The inherited method reserves nothing when it cuts; its loop reserves by
        # `fits_within_context_window`.
        added = self._num_added_tokens(text, expected_completion_token_length > 0)
        max_length = self.max_request_length - expected_completion_token_length - added
        result = self.decode(self.encode(text, truncation=True, max_length=max_length).tokens)
        while result and not self.fits_within_context_window(
            result, expected_completion_token_length
        ):
            result = result[:-1]
        if not result and text:  # HELM's own loop would not end
            raise UsageError(
                f"the window of {self._model.name} has {self.max_request_length:,} tokens, which "
                f"leaves no prompt beside an answer of {expected_completion_token_length:,}; let "
                "the run ask for fewer (max_tokens; in run entries, increase_max_tokens adds to "
                "them)"
            )
        return result
