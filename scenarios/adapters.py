"""Adapters of LAMBADA and WikiText-2: the windows and token counts that define their metrics.

HELM chooses an adapter by its spec's method alone. A spec of a class below brings its own adapter
(`make_adapter`, called by `flexgen_helm.plugin.helm_patches`) and keeps HELM's method, by which
HELM displays the run. Without the plugin HELM would use the method's own adapter; our metrics
refuse its requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helm.benchmark.adaptation.adapter_spec import ADAPT_GENERATION, AdapterSpec
from helm.benchmark.adaptation.adapters.adapter import Adapter
from helm.benchmark.adaptation.adapters.language_modeling_adapter import LanguageModelingAdapter
from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.scenarios.scenario import EVAL_SPLITS, Instance
from helm.benchmark.window_services.tokenizer_service import TokenizerService
from helm.benchmark.window_services.window_service import WindowService
from helm.common.general import parallel_map
from helm.common.request import Request
from helm.common.tokenization_request import TokenizationToken

from flexgen_helm.errors import UsageError
from flexgen_helm.plugin.convert import PlainTextRequest, TokenRequest


@dataclass(frozen=True)
class WindowAdapterSpec(AdapterSpec):
    """For running text, in windows.

    max_length: maximum number of tokens that a window predicts.
    """

    max_length: int = 2048

    def make_adapter(self, tokenizer_service: TokenizerService) -> Adapter:
        return WindowAdapter(self, tokenizer_service)


@dataclass(frozen=True)
class LastWordAdapterSpec(AdapterSpec):
    """For instances with a context and one reference that continues it, with its leading space."""

    def make_adapter(self, tokenizer_service: TokenizerService) -> Adapter:
        return LastWordAdapter(self, tokenizer_service)


class WindowAdapter(LanguageModelingAdapter):
    """HELM's adapter with an option for the length of windows, which are sent as token ids.

    HELM's own sends windows as text, which is encoded again. Tokens next to a border may then be
    others, or more, and the client would put BOS before the middle of a document if the window has
    room for it.
    """

    def _generate_requests(self, eval_instance: Instance) -> list[RequestState]:
        ids = _encode(self.window_service, eval_instance.input.text)
        prefix = _encode(self.window_service, self.window_service.prefix_token)
        if len(prefix) != 1:
            raise UsageError(
                f"{self.adapter_spec.model_deployment} has no single token that begins a document"
            )
        states = []
        for window, conditioning in windows(ids, prefix[0], self._length()):
            request = TokenRequest(
                model=self.adapter_spec.model,
                model_deployment=self.adapter_spec.model_deployment,
                prompt=self.window_service.decode([TokenizationToken(token) for token in window]),
                prompt_token_ids=tuple(window),
                num_completions=1,
                temperature=0.0,
                max_tokens=0,
                stop_sequences=[],
                echo_prompt=True,
                random=self.adapter_spec.random,
            )
            states.append(_state(eval_instance, request, conditioning))
        return states

    def _length(self) -> int:
        spec, service = self.adapter_spec, self.window_service
        assert isinstance(spec, WindowAdapterSpec)
        # A request is a window and the token before it, and its last token is never fed to the
        # model.
        longest = (
            min(service.max_request_length, service.max_sequence_and_generated_tokens_length) - 1
        )
        return min(spec.max_length, service.max_sequence_length, longest)


def windows(ids: Sequence[int], prefix: int, length: int) -> list[tuple[list[int], int]]:
    """Return windows that predict every token once, and the number of context tokens of each.

    length: maximum number of tokens that a window predicts.

        tokens       t0 t1 t2 t3 t4 t5 t6          length = 3
        window 1   P t0 t1 t2                      predicts t0 t1 t2 after the prefix P
        window 2           t2 t3 t4 t5             predicts t3 t4 t5
        window 3              t3 t4 t5 t6          predicts t6: the last window is filled with
                                                   context

    The model is fed at most `length` tokens, because the last token of a window is only predicted.
    """
    windows = [([prefix, *ids[:length]], 1)] if ids else []
    for start in range(length, len(ids), length):
        end = min(start + length, len(ids))
        first = end - length - 1
        windows.append((list(ids[first:end]), start - first))
    return windows


class LastWordAdapter(Adapter):
    """One request per instance, for as many tokens as its reference has.

    The spec's method decides: generate that many tokens after the context, or score the reference
    after it.
    """

    def adapt(self, instances: list[Instance], parallelism: int) -> list[RequestState]:
        evaluated = [instance for instance in instances if instance.split in EVAL_SPLITS]
        states: list[RequestState] = parallel_map(self._state, evaluated, parallelism)
        return states

    def _state(self, instance: Instance) -> RequestState:
        context, target = token_counts(instance, self.window_service)
        generates = self.adapter_spec.method == ADAPT_GENERATION
        text = instance.input.text
        request = PlainTextRequest(
            model=self.adapter_spec.model,
            model_deployment=self.adapter_spec.model_deployment,
            prompt=text if generates else text + reference_text(instance),
            num_completions=1,
            temperature=0.0,
            max_tokens=target if generates else 0,
            stop_sequences=[],
            echo_prompt=not generates,
            random=self.adapter_spec.random,
        )
        return _state(instance, request, conditioning=0 if generates else context)


def reference_text(instance: Instance) -> str:
    """Return the one continuation that counts as correct."""
    return instance.references[0].output.text


def token_counts(instance: Instance, service: WindowService) -> tuple[int, int]:
    """Return the number of tokens of the context, and the number that the reference adds to
    them.
    """
    context = len(_encode(service, instance.input.text))
    target = len(_encode(service, instance.input.text + reference_text(instance))) - context
    if target < 1:
        raise UsageError(
            f"instance {instance.id}: the tokenizer joins the last word to its context"
        )
    return context, target


def _encode(service: WindowService, text: str) -> list[int]:
    return [int(token.value) for token in service.encode(text).tokens]


def _state(instance: Instance, request: Request, conditioning: int) -> RequestState:
    return RequestState(
        instance=instance,
        reference_index=None,
        request_mode=None,
        train_trial_index=0,
        output_mapping=None,
        request=request,
        result=None,
        num_train_instances=0,
        prompt_truncated=False,
        num_conditioning_tokens=conditioning,
    )
