"""The metrics of LAMBADA and WikiText-2, as lm-evaluation-harness defines them.

Every instance gets its sums (log-probability, tokens, words, bytes), and every score follows from
the sums over all instances. HELM's own language-modelling metric knows neither words nor targets,
and counts bytes after detokenizing.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence

from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.metrics.basic_metrics import (
    compute_request_state_metrics,
    get_request_state_metrics_metadata,
)
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
    """Statistics per instance and over all of them; a subclass says what is summed and which scores
    follow.
    """

    def __init__(self) -> None:
        self._efficiency = EfficiencyMetric()

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def sums(self, states: Sequence[RequestState], service: WindowService) -> dict[str, float]:
        """Return the sums of one instance from all its requests in order."""

    def scores(self, total: Mapping[str, float], num_instances: int) -> dict[str, float]:
        """Return the scores beside the means, from the sums over all instances."""
        return {}

    @abstractmethod
    def score_metadata(self) -> list[MetricMetadata]:
        """Return what HELM's tables show of the sums and the scores."""

    def evaluate(
        self,
        scenario_state: ScenarioState,
        metric_service: MetricService,
        eval_cache_path: str,
        parallelism: int,
    ) -> MetricResult:
        spec = scenario_state.adapter_spec
        service = WindowServiceFactory.get_window_service(spec.model_deployment, metric_service)
        by_instance: dict[object, list[RequestState]] = defaultdict(list)
        for state in scenario_state.request_states:
            by_instance[state.instance.id, state.instance.perturbation].append(state)

        totals: dict[MetricContext, dict[MetricName, Stat]] = defaultdict(dict)
        per_instance = []
        for states in by_instance.values():
            stats: dict[MetricName, Stat] = {}
            for state in states:
                for stat in compute_request_state_metrics(
                    self._efficiency, spec, state, metric_service
                ):
                    merge_stat(stats, stat)
            for name, value in self.sums(states, service).items():
                merge_stat(stats, Stat(MetricName(name)).add(value))
            instance = states[0].instance
            context = MetricContext.from_instance(instance)
            with_context = [add_context(stat, context) for stat in stats.values()]
            per_instance.append(
                PerInstanceStats(str(instance.id), instance.perturbation, 0, with_context)
            )
            merge_stat(stats, Stat(MetricName("num_instances")).add(1))
            for stat in stats.values():
                merge_stat(totals[context], stat)
        return MetricResult(self._aggregated(totals), per_instance)

    def _aggregated(self, totals: Mapping[MetricContext, Mapping[MetricName, Stat]]) -> list[Stat]:
        aggregated = []
        for context, stats in totals.items():
            num_instances = stats[MetricName("num_instances")].count
            scores = self.scores(
                {name.name: stat.sum for name, stat in stats.items()}, num_instances
            )
            means = {name.name: stat.mean for name, stat in stats.items()}
            for name, value in {**means, "num_instances": num_instances, **scores}.items():
                aggregated.append(add_context(Stat(MetricName(name)).add(value), context))
        return aggregated

    def get_metadata(self) -> list[MetricMetadata]:
        return [
            *get_request_state_metrics_metadata(self._efficiency),
            MetricMetadata(
                name="num_instances",
                display_name="# eval",
                description="Number of evaluation instances.",
            ),
            *self.score_metadata(),
        ]


class LambadaAccuracyMetric(_SumsMetric):
    """`exact_match`: whether every token of the last word is the most probable one.

    Its mean is the accuracy.
    """

    def sums(self, states: Sequence[RequestState], service: WindowService) -> dict[str, float]:
        (state,) = states
        context, target = token_counts(state.instance, service)
        if state.request.max_tokens != target:
            raise _other_request(
                state, f"it asks for {state.request.max_tokens} tokens, the last word has {target}"
            )
        # By tokens and not by text, which different tokens may share. Clients write them as their
        # tokenizer does, or, as HELM's own, as it decodes each: `Ġfox` is ` fox` then.
        passage = state.instance.input.text + reference_text(state.instance)
        ids = service.encode(passage).tokens[context:]
        spellings = service.tokenize(passage)[context:], [service.decode([token]) for token in ids]
        return {"exact_match": float([token.text for token in _tokens(state)] in spellings)}

    def score_metadata(self) -> list[MetricMetadata]:
        # HELM's own words, because HELM's tables know this metric by its name.
        text = (
            "Fraction of instances that the predicted output matches a correct reference exactly."
        )
        return [MetricMetadata("exact_match", "Exact match", "EM", text, False, "accuracy")]


class LambadaPerplexityMetric(_SumsMetric):
    """`target_perplexity`: exp of the mean over passages of -log p(last word | context)."""

    def sums(self, states: Sequence[RequestState], service: WindowService) -> dict[str, float]:
        (state,) = states
        context, target = token_counts(state.instance, service)
        tokens = _tokens(state)
        if state.num_conditioning_tokens != context or len(tokens) != context + target:
            raise _other_request(
                state, f"{len(tokens)} tokens came back, the passage has {context + target}"
            )
        scored = tokens[context:]
        return {
            "logprob": sum(token.logprob for token in scored),
            "num_perplexity_tokens": len(scored),
        }

    def scores(self, total: Mapping[str, float], num_instances: int) -> dict[str, float]:
        perplexity = math.exp(-total["logprob"] / num_instances)
        return {"target_perplexity": perplexity, "perplexity": perplexity}

    def score_metadata(self) -> list[MetricMetadata]:
        text = "Exponential of the mean over passages of -log p(last word | context)."
        return [
            MetricMetadata(
                "target_perplexity", "Target perplexity", "Target PPL", text, True, "perplexity"
            ),
            _perplexity_metadata("target_perplexity"),
            *_sums_metadata(),
        ]


class WikitextMetric(_SumsMetric):
    """Perplexity per word, byte and token, and bits per byte, over all pages together."""

    def sums(self, states: Sequence[RequestState], service: WindowService) -> dict[str, float]:
        logprob, num_tokens = 0.0, 0
        for state in states:
            tokens = _tokens(state)
            if not isinstance(state.request, TokenRequest):
                raise _other_request(
                    state, "it is text, whose tokens next to a window's border may be others"
                )
            window = len(state.request.prompt_token_ids)
            if len(tokens) != window:
                raise FlexgenError(
                    f"{len(tokens)} tokens came back for a window of {window}: "
                    f"{state.request.model_deployment} takes no token ids, which wikitext needs; "
                    "use a flexgen/ model"
                )
            scored = tokens[state.num_conditioning_tokens :]
            logprob += sum(token.logprob for token in scored)
            num_tokens += len(scored)
        size = states[0].instance.extra_data or {}
        return {
            "logprob": logprob,
            "num_perplexity_tokens": num_tokens,
            "num_words": size["words"],
            "num_bytes": size["bytes"],
        }

    def scores(self, total: Mapping[str, float], num_instances: int) -> dict[str, float]:
        loss = -total["logprob"]
        token_perplexity = math.exp(loss / total["num_perplexity_tokens"])
        return {
            "word_perplexity": math.exp(loss / total["num_words"]),
            "byte_perplexity": math.exp(loss / total["num_bytes"]),
            "bits_per_byte": loss / total["num_bytes"] / math.log(2),
            "token_perplexity": token_perplexity,
            "perplexity": token_perplexity,
        }

    def score_metadata(self) -> list[MetricMetadata]:
        units = {
            "word": "per word of the original text",
            "byte": "per byte of the original text",
            "token": "per token of the model's tokenizer",
        }
        bits = "Average number of bits per byte of the original text."
        return [
            *(
                MetricMetadata(
                    f"{unit}_perplexity",
                    f"{unit.capitalize()} perplexity",
                    f"{unit.capitalize()} PPL",
                    f"Effective branching factor {text}.",
                    True,
                    "perplexity",
                )
                for unit, text in units.items()
            ),
            MetricMetadata("bits_per_byte", "Bits/byte", "BPB", bits, True, "perplexity"),
            _perplexity_metadata("token_perplexity"),
            *_sums_metadata(),
            MetricMetadata(
                name="num_words",
                display_name="# words",
                description="Mean words of an original page.",
            ),
            MetricMetadata(
                name="num_bytes",
                display_name="# bytes",
                description="Mean bytes of an original page.",
            ),
        ]


def _tokens(state: RequestState) -> list[Token]:
    assert state.result is not None, "metrics are computed after execution"
    return state.result.completions[0].tokens


def _other_request(state: RequestState, difference: str) -> FlexgenError:
    """Return the error for a request that our adapters did not make: its score would be another
    metric.
    """
    return FlexgenError(
        f"instance {state.instance.id}: the request is not the one that defines this figure "
        f"({difference}); it needs the plugin's adapters and HELM 0.5.16: run flexgen-helm doctor"
    )


def _perplexity_metadata(same_as: str) -> MetricMetadata:
    text = f"The same as {same_as}, under the name that HELM's tables know."
    return MetricMetadata("perplexity", "Perplexity", "PPL", text, True)


def _sums_metadata() -> list[MetricMetadata]:
    text = "Mean over instances of the sum of the log-probabilities of the tokens that are scored."
    tokens = "Mean number of tokens that are scored."
    return [
        MetricMetadata("logprob", "Log probability", "Logprob", text, False),
        MetricMetadata(name="num_perplexity_tokens", display_name="# tokens", description=tokens),
    ]
