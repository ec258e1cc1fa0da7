"""The figures of LAMBADA and WikiText-2, as lm-evaluation-harness defines them.

Every instance gets its sums (log-probability, tokens, words, bytes), and every figure follows from the sums over all
instances. HELM's own language-modelling metric knows neither words nor targets, and counts bytes after detokenizing.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence

from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.metrics.basic_metrics import compute_request_state_metrics, get_request_state_metrics_metadata
from helm.benchmark.metrics.efficiency_metrics import EfficiencyMetric
from helm.benchmark.metrics.metric import (
    MetricInterface,
    MetricMetadata,
    MetricResult,
    PerInstanceStats,
    add_context,
)
from helm.benchmark.metrics.metric_name import MetricContext, MetricName
from helm.benchmark.metrics.metric_service import MetricService
from helm.benchmark.metrics.statistic import Stat, merge_stat
from helm.benchmark.window_services.window_service import WindowService
from helm.benchmark.window_services.window_service_factory import WindowServiceFactory
from helm.common.request import Token

from flexgen_helm.errors import FlexgenError
from flexgen_helm.plugin.convert import TokenRequest
from flexgen_helm.scenarios.adapters import reference_text, token_counts


class _SumsMetric(MetricInterface):
    """Statistics by instance and over all of them; a subclass says what is summed and what follows from the sums."""

    def __init__(self) -> None:
        self._efficiency = EfficiencyMetric()

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def sums(self, states: Sequence[RequestState], service: WindowService) -> dict[str, float]:
        """Of one instance, from all its requests in order."""

    @abstractmethod
    def figures(self, total: Mapping[str, float], instances: int) -> dict[str, float]:
        """Of the whole, from what `sums` gave, added up."""

    @abstractmethod
    def own_metadata(self) -> list[MetricMetadata]: ...

    def evaluate(
        self, scenario_state: ScenarioState, metric_service: MetricService, eval_cache_path: str, parallelism: int
    ) -> MetricResult:
        spec = scenario_state.adapter_spec
        service = WindowServiceFactory.get_window_service(spec.model_deployment, metric_service)
        groups: dict[object, list[RequestState]] = defaultdict(list)
        for state in scenario_state.request_states:
            groups[state.instance.id, state.instance.perturbation].append(state)

        totals: dict[MetricContext, dict[MetricName, Stat]] = defaultdict(dict)
        per_instance = []
        for states in groups.values():
            own: dict[MetricName, Stat] = {}
            for state in states:
                for stat in compute_request_state_metrics(self._efficiency, spec, state, metric_service):
                    merge_stat(own, stat)
            for name, value in self.sums(states, service).items():
                merge_stat(own, Stat(MetricName(name)).add(value))
            instance = states[0].instance
            context = MetricContext.from_instance(instance)
            with_context = [add_context(stat, context) for stat in own.values()]
            per_instance.append(PerInstanceStats(str(instance.id), instance.perturbation, 0, with_context))
            merge_stat(own, Stat(MetricName("num_instances")).add(1))
            for stat in own.values():
                merge_stat(totals[context], stat)
        return MetricResult(self._aggregated(totals), per_instance)

    def _aggregated(self, totals: Mapping[MetricContext, Mapping[MetricName, Stat]]) -> list[Stat]:
        found = []
        for context, stats in totals.items():
            instances = stats[MetricName("num_instances")].count
            figures = self.figures({name.name: stat.sum for name, stat in stats.items()}, instances)
            means = {name.name: stat.mean for name, stat in stats.items()}
            for name, value in {**means, "num_instances": instances, **figures}.items():
                found.append(add_context(Stat(MetricName(name)).add(value), context))
        return found

    def get_metadata(self) -> list[MetricMetadata]:
        return [
            *get_request_state_metrics_metadata(self._efficiency),
            MetricMetadata(name="num_instances", display_name="# eval", description="Number of evaluation instances."),
            *self.own_metadata(),
        ]


class LambadaAccuracyMetric(_SumsMetric):
    """`exact_match`: whether every token of the last word is the most probable one."""

    def sums(self, states: Sequence[RequestState], service: WindowService) -> dict[str, float]:
        (state,) = states
        context, target = token_counts(state.instance, service)
        if state.request.max_tokens != target:
            raise _foreign(state, f"it asks for {state.request.max_tokens} tokens where the last word has {target}")
        # By tokens and not by text, which different tokens may share.
        wanted = service.tokenize(state.instance.input.text + reference_text(state.instance))[context:]
        return {"exact_match": float([token.text for token in _tokens(state)] == wanted)}

    def figures(self, total: Mapping[str, float], instances: int) -> dict[str, float]:
        return {}  # the mean is the accuracy

    def own_metadata(self) -> list[MetricMetadata]:
        return [
            # HELM's own words, because HELM's tables know this metric by its name.
            MetricMetadata(
                name="exact_match",
                display_name="Exact match",
                short_display_name="EM",
                description="Fraction of instances that the predicted output matches a correct reference exactly.",
                lower_is_better=False,
                group="accuracy",
            )
        ]


class LambadaPerplexityMetric(_SumsMetric):
    """`target_perplexity`: exp of the mean over passages of -log p(last word | context)."""

    def sums(self, states: Sequence[RequestState], service: WindowService) -> dict[str, float]:
        (state,) = states
        context, target = token_counts(state.instance, service)
        tokens = _tokens(state)
        if state.num_conditioning_tokens != context or len(tokens) != context + target:
            raise _foreign(state, f"{len(tokens)} tokens came back where the passage has {context + target}")
        scored = tokens[context:]
        return {"logprob": sum(token.logprob for token in scored), "num_perplexity_tokens": len(scored)}

    def figures(self, total: Mapping[str, float], instances: int) -> dict[str, float]:
        perplexity = math.exp(-total["logprob"] / instances)
        return {"target_perplexity": perplexity, "perplexity": perplexity}

    def own_metadata(self) -> list[MetricMetadata]:
        return [
            MetricMetadata(
                name="target_perplexity",
                display_name="Target perplexity",
                short_display_name="Target PPL",
                description="Exponential of the mean over passages of -log p(last word | context).",
                lower_is_better=True,
                group="perplexity",
            ),
            _perplexity_metadata("target_perplexity"),
            *_sums_metadata(),
        ]


class WikitextMetric(_SumsMetric):
    """Perplexity by word, byte and token, and bits per byte, over all pages together."""

    def sums(self, states: Sequence[RequestState], service: WindowService) -> dict[str, float]:
        logprob, tokens = 0.0, 0
        for state in states:
            returned = _tokens(state)
            if not isinstance(state.request, TokenRequest):
                raise _foreign(state, "it is text, whose tokens next to a window's border may be others")
            if len(returned) != len(state.request.prompt_token_ids):
                asked = len(state.request.prompt_token_ids)
                raise FlexgenError(
                    f"{len(returned)} tokens came back for a window of {asked}: {state.request.model_deployment} "
                    "takes no token ids, which wikitext needs; use a flexgen/ model"
                )
            scored = returned[state.num_conditioning_tokens :]
            logprob += sum(token.logprob for token in scored)
            tokens += len(scored)
        size = states[0].instance.extra_data or {}
        return {
            "logprob": logprob,
            "num_perplexity_tokens": tokens,
            "num_words": size["words"],
            "num_bytes": size["bytes"],
        }

    def figures(self, total: Mapping[str, float], instances: int) -> dict[str, float]:
        loss = -total["logprob"]
        by_token = math.exp(loss / total["num_perplexity_tokens"])
        return {
            "word_perplexity": math.exp(loss / total["num_words"]),
            "byte_perplexity": math.exp(loss / total["num_bytes"]),
            "bits_per_byte": loss / total["num_bytes"] / math.log(2),
            "token_perplexity": by_token,
            "perplexity": by_token,
        }

    def own_metadata(self) -> list[MetricMetadata]:
        described = {
            "word_perplexity": ("Word perplexity", "Word PPL", "per word of the original text"),
            "byte_perplexity": ("Byte perplexity", "Byte PPL", "per byte of the original text"),
            "token_perplexity": ("Token perplexity", "Token PPL", "per token of the model's tokenizer"),
        }
        return [
            *(
                MetricMetadata(name, title, short, f"Effective branching factor {what}.", True, "perplexity")
                for name, (title, short, what) in described.items()
            ),
            MetricMetadata(
                name="bits_per_byte",
                display_name="Bits/byte",
                short_display_name="BPB",
                description="Average number of bits per byte of the original text.",
                lower_is_better=True,
                group="perplexity",
            ),
            _perplexity_metadata("token_perplexity"),
            *_sums_metadata(),
            MetricMetadata(name="num_words", display_name="# words", description="Mean words of an original page."),
            MetricMetadata(name="num_bytes", display_name="# bytes", description="Mean bytes of an original page."),
        ]


def _tokens(state: RequestState) -> list[Token]:
    assert state.result is not None, "metrics are computed after execution"
    return state.result.completions[0].tokens


def _foreign(state: RequestState, why: str) -> FlexgenError:
    """The error for a request that our adapters did not make: its score would be another figure."""
    return FlexgenError(
        f"instance {state.instance.id}: the request is not the one that defines this figure ({why}); it needs the "
        "plugin's adapters and HELM 0.5.16: run flexgen-helm doctor"
    )


def _perplexity_metadata(same_as: str) -> MetricMetadata:
    return MetricMetadata(
        name="perplexity",
        display_name="Perplexity",
        short_display_name="PPL",
        description=f"The same as {same_as}, under the name that HELM's tables know.",
        lower_is_better=True,
    )


def _sums_metadata() -> list[MetricMetadata]:
    return [
        MetricMetadata(
            name="logprob",
            display_name="Log probability",
            short_display_name="Logprob",
            description="Mean over instances of the sum of the log-probabilities of the tokens that are scored.",
            lower_is_better=False,
        ),
        MetricMetadata(
            name="num_perplexity_tokens", display_name="# tokens", description="Mean number of tokens that are scored."
        ),
    ]
