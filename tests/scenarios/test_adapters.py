"""The adapters that make requests of token ids, and what is refused without them."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helm.benchmark.adaptation.adapter_spec import AdapterSpec
from helm.benchmark.adaptation.adapters.adapter_factory import AdapterFactory
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.metrics.metric import create_metric
from helm.benchmark.run_spec_factory import construct_run_specs
from helm.benchmark.scenarios.scenario import with_instance_ids
from helm.common.object_spec import parse_object_spec
from helm.common.request import GeneratedOutput, RequestResult, Token

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.errors import FlexgenError
from flexgen_helm.plugin import convert
from flexgen_helm.plugin.convert import TokenRequest
from flexgen_helm.scenarios import adapters, lambada, wikitext
from flexgen_helm.service.models import PromptEncoder
from tests.helpers import fake_engine
from tests.helpers.data_sets import FAKE_ENTRIES
from tests.helpers.helm_runs import MODEL


@pytest.fixture
def on_fakes(monkeypatch):
    """The window service that HELM makes for `MODEL` is that of the fake tokenizer."""

    def tokens(text):
        return [SimpleNamespace(value=ord(character)) for character in text]

    service = SimpleNamespace(
        max_sequence_length=60, max_request_length=61, max_sequence_and_generated_tokens_length=10**9,
        prefix_token="\x02", end_of_text_token="\x02", tokenize=list,
        encode=lambda text, **_: SimpleNamespace(tokens=tokens(text), text=text),
        decode=lambda tokens, text=None: "".join(chr(token.value) for token in tokens),
        fits_within_context_window=lambda *_, **__: True, truncate_from_right=lambda text, *_: text,
    )  # fmt: skip
    found = "helm.benchmark.window_services.window_service_factory.WindowServiceFactory.get_window_service"
    monkeypatch.setattr(found, staticmethod(lambda *_: service))
    efficiency = "flexgen_helm.scenarios.metrics.compute_request_state_metrics"
    monkeypatch.setattr(efficiency, lambda *_: [])


def executed(spec, adapter_spec, foreign=False):
    """Adapt as a run does, answer with the fake engine, compute the run's own metric.

    foreign: with the adapter that HELM has for the method.
    """
    scenario = (
        wikitext.WikitextScenario()
        if "wikitext" in spec.name
        else lambada.LambadaScenario("accuracy")
    )
    instances = with_instance_ids(scenario.get_instances(""))
    if foreign:
        plain = {name: getattr(adapter_spec, name) for name in AdapterSpec.__dataclass_fields__}
        adapter_spec = AdapterSpec(**plain)
    adapter = AdapterFactory.get_adapter(adapter_spec, None)  # type: ignore[arg-type]
    states = [
        replace(state, result=fake_result(state.request)) for state in adapter.adapt(instances, 1)
    ]
    metric = create_metric(spec.metric_specs[0])
    return metric.evaluate(ScenarioState(adapter_spec, states), None, "", 1)  # type: ignore[arg-type]


def fake_result(request):
    encoder = PromptEncoder(fake_engine.FakeTokenizer())  # type: ignore[arg-type]
    prepared = convert.to_generation_request(request, encoder, 10**6)
    return convert.to_request_result(
        request, prepared, fake_engine.answer(prepared.request), False, encoder
    )


def run_spec(entry):
    return construct_run_specs(parse_object_spec(entry))[0]


@pytest.mark.parametrize("entry", FAKE_ENTRIES)
def test_figures_refuse_requests_of_helms_own_adapters(entry, fake_data, on_fakes):
    spec = run_spec(entry)
    assert executed(spec, spec.adapter_spec).aggregated_stats
    with pytest.raises(
        FlexgenError, match=("the request is not the one that defines this figure.*doctor")
    ):
        executed(spec, spec.adapter_spec, foreign=True)


def test_a_client_that_takes_no_ids_is_refused(fake_data, on_fakes, monkeypatch):
    spec = run_spec(FAKE_ENTRIES[3])
    one_more = GeneratedOutput(text="", logprob=0.0, tokens=[Token("a", -1.0)] * 53)
    answer = RequestResult(True, [], [one_more], False)
    monkeypatch.setattr(sys.modules[__name__], "fake_result", lambda request: answer)
    with pytest.raises(
        FlexgenError, match=("53 tokens came back for a window of 51.*takes no token ids")
    ):
        executed(spec, spec.adapter_spec)


@pytest.mark.parametrize("max_length, longest", [(2048, 60), (50, 50), (60, 60)])
def test_windows_are_bounded_by_the_models_positions(max_length, longest, fake_data, on_fakes):
    spec = run_spec(f"wikitext:max_length={max_length},model={MODEL}")
    adapter = AdapterFactory.get_adapter(spec.adapter_spec, None)  # type: ignore[arg-type]
    states = adapter.adapt(with_instance_ids(wikitext.WikitextScenario().get_instances("")), 1)
    ids = [state.request.prompt_token_ids for state in states]  # type: ignore[attr-defined]
    assert max(map(len, ids)) == longest + 1


@pytest.mark.parametrize("length", [1, 3, 7, 8, 100])
def test_windows_predict_every_token_once_and_are_filled_with_context(length):
    ids = list(range(10, 18))
    found = adapters.windows(ids, 0, length)
    assert [token for window, context in found for token in window[context:]] == ids
    assert found[0] == ([0, *ids[:length]], 1)
    for window, context in found[1:]:
        assert len(window) == length + 1 and context >= 1
        assert window == ids[ids.index(window[0]) :][: length + 1]
    assert adapters.windows([], 0, length) == []


def test_windows_are_those_of_helms_own_adapter(on_fakes, fake_data):
    """Where the tokens of a text do not depend on where it is cut, and the model's positions are
    the length.
    """
    spec = run_spec(f"wikitext:max_length=60,model={MODEL}")
    plain = AdapterSpec(
        **{name: getattr(spec.adapter_spec, name) for name in AdapterSpec.__dataclass_fields__}
    )
    instances = with_instance_ids(wikitext.WikitextScenario().get_instances(""))
    ours, helms = (
        [
            (state.request.prompt, state.num_conditioning_tokens)
            for state in adapter.adapt(instances, 1)
        ]
        for adapter in (AdapterFactory.get_adapter(one, None) for one in (spec.adapter_spec, plain))  # type: ignore
    )
    assert ours == helms and len(ours) > len(instances)


def test_token_requests_are_taken_as_they_are():
    """No BOS before a window, where text of the same length gets one; other ids are another
    request.
    """
    tokenizer = fake_engine.FakeTokenizer(adds_bos=True)
    encoder = PromptEncoder(tokenizer)  # type: ignore[arg-type]
    fields = dict(model="m", model_deployment="m", max_tokens=0, temperature=0.0, echo_prompt=True)
    request = TokenRequest(prompt="abc", prompt_token_ids=(5, 6, 7), **fields)
    prepared = convert.to_generation_request(request, encoder, 100)
    assert prepared.request.prompt_token_ids == (5, 6, 7)
    echoed = convert.to_request_result(
        request, prepared, fake_engine.answer(prepared.request), False, encoder
    )
    assert [token.text for token in echoed.completions[0].tokens] == ["\x05", "\x06", "\x07"]
    changed = convert.to_generation_request(
        replace(request, prompt_token_ids=(5, 6, 8)), encoder, 100
    )
    assert changed.key != prepared.key
    text = convert.to_generation_request(convert.Request(prompt="abc", **fields), encoder, 100)
    assert text.request.prompt_token_ids == (tokenizer.bos_id, *map(ord, "abc"))
    assert "prompt_token_ids" not in repr(request)  # HELM writes the whole request into every error
