"""LAMBADA and WikiText-2 through real `helm-run`: figures against a direct computation, and what is refused."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helm.benchmark.adaptation.adapter_spec import AdapterSpec
from helm.benchmark.adaptation.adapters.adapter_factory import AdapterFactory
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.metrics.metric import create_metric
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.run_spec_factory import construct_run_specs
from helm.benchmark.scenarios.scenario import with_instance_ids
from helm.common.object_spec import parse_object_spec
from helm.common.request import GeneratedOutput, RequestResult, Token

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.core.errors import FlexgenError
from flexgen_helm.core.records import GenerationRequest
from flexgen_helm.plugin import convert
from flexgen_helm.plugin.token_request import TokenRequest
from flexgen_helm.report.scores import read_scores
from flexgen_helm.scenarios import adapters, lambada, wikitext
from tests import fake_engine
from tests.conftest import TinyModel
from tests.test_plugin_helm_run import MODEL, Place, stats_of

Score = Callable[[list[int]], list[float]]
PREFIX = 2  # of the fake tokenizer, whose tokens are characters
WORDS = ["the", "of", "and", "to", "in", "a", "is", "that", "it", "was", "for", "on", "as", "with", "by", "he"]


def write_data(folder: Path, passages: Sequence[str], pages: Sequence[str]) -> Path:
    folder.mkdir()
    (folder / lambada.FILE).write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    (folder / wikitext.FILE).write_text("\n".join(pages))
    return folder


def invented_page(title: str, words: int) -> str:
    text = random.Random(title).choices(WORDS, k=words)
    return f" = {title} = \n \n " + " ".join(text) + " , 1 @,@ 000 . \n "


PAGES = [invented_page("One", 30), invented_page("Two", 90), invented_page("Three", 55)]


def rolling_logprob(ids: list[int], prefix: int, length: int, score: Score) -> float:
    """By the harness's definition: rolling windows of `length` inputs, whose last predictions count.

    score(ids) = log p(ids[i] | ids[:i]) for every i.
    """
    text, total, predicted = [prefix, *ids], 0.0, 0
    while predicted < len(ids):
        counted = min(length, len(ids) - predicted)
        predicted += counted
        inputs_and_last = text[max(0, predicted - length) : predicted + 1]
        total += sum(score(inputs_and_last)[-counted:])
    return total


def expected_wikitext(
    pages: Sequence[str], encode: Callable[[str], list[int]], prefix: int, length: int, score: Score
) -> dict[str, float]:
    texts = [wikitext.detokenize(page) for page in pages]
    loss = -sum(rolling_logprob(encode(text), prefix, length, score) for text in texts)
    # White space at either end of a page separates an empty word.
    words = sum(len(page.split()) + page[0].isspace() + page[-1].isspace() for page in pages)
    size = sum(len(page.encode()) for page in pages)
    return {
        "word_perplexity": math.exp(loss / words),
        "byte_perplexity": math.exp(loss / size),
        "bits_per_byte": loss / size / math.log(2),
        "token_perplexity": math.exp(loss / sum(len(encode(text)) for text in texts)),
    }


def figures(folder: Path) -> dict[str, float]:
    return {name: stat["mean"] for name, stat in stats_of(folder).items() if stat["count"]}


# ---- on the fake engine ----

FAKE_PASSAGES = [f"{' '.join(WORDS[i : i + 6])} word{i}" for i in range(6)]
FAKE_ENTRIES = [
    f"lambada:mode=accuracy,model={MODEL}",
    f"lambada:mode=perplexity,model={MODEL}",
    f"wikitext:model={MODEL}",
    f"wikitext:max_length=50,model={MODEL}",
]


def fake_score(ids: list[int]) -> list[float]:
    scored = fake_engine.answer(GenerationRequest(prompt_token_ids=ids, max_tokens=0, echo_logprobs=True))
    return [0.0 if logprob is None else logprob for logprob in scored.prompt_logprobs or ()]


@pytest.fixture(scope="module")
def fake_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_data(tmp_path_factory.mktemp("data") / "data", FAKE_PASSAGES, PAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXGEN_HELM_DATA", str(folder))
        yield folder


@pytest.fixture(scope="module")
def suite(fake_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """All entries in one `flexgen-helm run`."""
    place = Place(tmp_path_factory.mktemp("suite"))
    place.run("suite", entries=FAKE_ENTRIES)
    return place


def folder_of(place: Place, entry: str) -> Path:
    return place.folder / "benchmark_output" / "runs" / "s" / entry.replace("/", "_")


def test_a_suite_equals_plain_runs_whatever_the_number_of_threads(suite: Place, tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.run("run", "-n", "1", entries=FAKE_ENTRIES)
    assert place.results() == suite.results()
    assert len(place.results()) == len(FAKE_ENTRIES)


def test_wikitext_is_scored_by_the_definition(suite: Place) -> None:
    for entry, length in ((FAKE_ENTRIES[2], wikitext.MAX_LENGTH), (FAKE_ENTRIES[3], 50)):
        found = figures(folder_of(suite, entry))
        expected = expected_wikitext(PAGES, lambda text: list(map(ord, text)), PREFIX, length, fake_score)
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)
        assert found["perplexity"] == found["token_perplexity"]
        assert found["num_instances"] == len(PAGES)
    short, long = (figures(folder_of(suite, entry))["word_perplexity"] for entry in FAKE_ENTRIES[2:])
    assert short != pytest.approx(long, rel=1e-6)  # the windows matter


def test_lambada_is_scored_by_the_definition(suite: Place) -> None:
    losses = []
    for passage in FAKE_PASSAGES:
        context, target = lambada.split_passage(passage)
        losses.append(-sum(fake_score(list(map(ord, passage)))[len(context) :]))
    found = figures(folder_of(suite, FAKE_ENTRIES[1]))
    assert found["target_perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-9)
    assert found["perplexity"] == found["target_perplexity"]
    assert figures(folder_of(suite, FAKE_ENTRIES[0]))["exact_match"] == 0.0  # the fake knows no 'w'


def test_every_instance_has_its_sums_for_paired_comparisons(suite: Place) -> None:
    for entry, name in ((FAKE_ENTRIES[0], "exact_match"), (FAKE_ENTRIES[1], "logprob"), (FAKE_ENTRIES[2], "logprob")):
        rows = json.loads((folder_of(suite, entry) / "per_instance_stats.json").read_text())
        named = [row for row in rows if any(stat["name"]["name"] == name for stat in row["stats"])]
        instances = len(PAGES) if entry.startswith("wikitext") else len(FAKE_PASSAGES)
        assert len({row["instance_id"] for row in named}) == len(named) == instances


def test_the_summary_leads_with_the_precise_names(suite: Place) -> None:
    shown = [list(read_scores(folder_of(suite, entry)).scores) for entry in FAKE_ENTRIES[:3]]
    assert shown == [["exact_match"], ["target_perplexity"], ["word_perplexity", "token_perplexity", "bits_per_byte"]]


def test_files_of_a_run_name_no_folder_of_this_machine(suite: Place) -> None:
    for entry in FAKE_ENTRIES:
        assert str(Path(__file__).parents[1]) not in (folder_of(suite, entry) / "scenario.json").read_text()


def test_without_data_a_suite_refuses_in_one_sentence_and_other_runs_are_kept(
    suite: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    place = Place(tmp_path)
    entries = [f"simple_mcqa:model={MODEL}", FAKE_ENTRIES[0], FAKE_ENTRIES[2]]
    output = place.run("suite", entries=entries, expect=2)
    for line in output.splitlines()[-2:]:
        assert "UsageError: the data of" in line and "FLEXGEN_HELM_DATA" in line and "from the hub" in line
    assert (place.run_folder("simple_mcqa") / "stats.json").is_file()
    assert place.events()["answer"] == 6


# ---- the adapters, and what happens without them ----


@pytest.fixture
def on_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window service that HELM makes for `MODEL` is that of the fake tokenizer."""

    def tokens(text: str) -> list[Any]:
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


def executed(spec: RunSpec, adapter_spec: AdapterSpec, foreign: bool = False) -> Any:
    """Adapt as a run does, answer with the fake engine, compute the run's own metric.

    foreign: with the adapter that HELM has for the method.
    """
    scenario = wikitext.WikitextScenario() if "wikitext" in spec.name else lambada.LambadaScenario("accuracy")
    instances = with_instance_ids(scenario.get_instances(""))
    if foreign:
        plain = {name: getattr(adapter_spec, name) for name in AdapterSpec.__dataclass_fields__}
        adapter_spec = AdapterSpec(**plain)
    adapter = AdapterFactory.get_adapter(adapter_spec, None)  # type: ignore[arg-type]
    states = [replace(state, result=fake_result(state.request)) for state in adapter.adapt(instances, 1)]
    metric = create_metric(spec.metric_specs[0])
    return metric.evaluate(ScenarioState(adapter_spec, states), None, "", 1)  # type: ignore[arg-type]


def fake_result(request: Any) -> RequestResult:
    question = convert.ask(request, fake_engine.FakeTokenizer(), 10**6)
    found = fake_engine.answer(question.request)
    return convert.reply(request, question, found, False, fake_engine.FakeTokenizer())


def run_spec(entry: str) -> RunSpec:
    return construct_run_specs(parse_object_spec(entry))[0]


@pytest.mark.parametrize("entry", FAKE_ENTRIES)
def test_figures_refuse_requests_of_helms_own_adapters(entry: str, fake_data: Path, on_fakes: None) -> None:
    spec = run_spec(entry)
    assert executed(spec, spec.adapter_spec).aggregated_stats
    with pytest.raises(FlexgenError, match="the request is not the one that defines this figure.*doctor"):
        executed(spec, spec.adapter_spec, foreign=True)


def test_a_client_that_takes_no_ids_is_refused(
    fake_data: Path, on_fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = run_spec(FAKE_ENTRIES[3])
    one_more = GeneratedOutput(text="", logprob=0.0, tokens=[Token("a", -1.0)] * 53)
    answer = RequestResult(True, [], [one_more], False)
    monkeypatch.setattr(sys.modules[__name__], "fake_result", lambda request: answer)
    with pytest.raises(FlexgenError, match="53 tokens came back for a window of 51.*takes no token ids"):
        executed(spec, spec.adapter_spec)


@pytest.mark.parametrize("asked, longest", [(2048, 60), (50, 50), (60, 60)])
def test_windows_are_bounded_by_the_models_positions(asked: int, longest: int, fake_data: Path, on_fakes: None) -> None:
    spec = run_spec(f"wikitext:max_length={asked},model={MODEL}")
    adapter = AdapterFactory.get_adapter(spec.adapter_spec, None)  # type: ignore[arg-type]
    states = adapter.adapt(with_instance_ids(wikitext.WikitextScenario().get_instances("")), 1)
    ids = [state.request.prompt_token_ids for state in states]  # type: ignore[attr-defined]
    assert max(map(len, ids)) == longest + 1


@pytest.mark.parametrize("length", [1, 3, 7, 8, 100])
def test_windows_predict_every_token_once_and_are_filled_with_context(length: int) -> None:
    ids = list(range(10, 18))
    found = adapters.windows(ids, 0, length)
    assert [token for window, context in found for token in window[context:]] == ids
    assert found[0] == ([0, *ids[:length]], 1)
    for window, context in found[1:]:
        assert len(window) == length + 1 and context >= 1
        assert window == ids[ids.index(window[0]) :][: length + 1]
    assert adapters.windows([], 0, length) == []


def test_windows_are_those_of_helms_own_adapter(on_fakes: None, fake_data: Path) -> None:
    """Where the tokens of a text do not depend on where it is cut, and the model's positions are the length."""
    spec = run_spec(f"wikitext:max_length=60,model={MODEL}")
    plain = AdapterSpec(**{name: getattr(spec.adapter_spec, name) for name in AdapterSpec.__dataclass_fields__})
    instances = with_instance_ids(wikitext.WikitextScenario().get_instances(""))
    ours, helms = (
        [(state.request.prompt, state.num_conditioning_tokens) for state in adapter.adapt(instances, 1)]
        for adapter in (AdapterFactory.get_adapter(one, None) for one in (spec.adapter_spec, plain))  # type: ignore
    )
    assert ours == helms and len(ours) > len(instances)


def test_token_requests_are_taken_as_they_are() -> None:
    """No BOS before a window, where text of the same length gets one; other ids are another question."""
    tokenizer = fake_engine.FakeTokenizer(adds_bos=True)
    fields = dict(model="m", model_deployment="m", max_tokens=0, temperature=0.0, echo_prompt=True)
    request = TokenRequest(prompt="abc", prompt_token_ids=(5, 6, 7), **fields)
    question = convert.ask(request, tokenizer, 100)
    assert question.request.prompt_token_ids == (5, 6, 7)
    echoed = convert.reply(request, question, fake_engine.answer(question.request), False, tokenizer)
    assert [token.text for token in echoed.completions[0].tokens] == ["\x05", "\x06", "\x07"]
    other = convert.ask(replace(request, prompt_token_ids=(5, 6, 8)), tokenizer, 100)
    assert other.key != question.key
    text = convert.ask(convert.Request(prompt="abc", **fields), tokenizer, 100)
    assert text.request.prompt_token_ids == (tokenizer.bos_id, *map(ord, "abc"))
    assert "prompt_token_ids" not in repr(request)  # HELM writes the whole request into every error


# ---- on a real engine ----


def tiny_passages(
    model: TinyModel, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> list[str]:
    """Passages of which some end in what the model says, of one token and of two, and some do not."""
    rng, found, hits = random.Random(5), [], {1: 0, 2: 0}
    for _ in range(4000):
        context = " ".join(rng.choices(WORDS, k=6))
        ids = encode(context)
        for length in (1, 2):
            ids = [*ids, int(model.logprobs(ids)[-1].argmax())]
            target = decode(ids[-length:])
            word = target[:1] == " " and target[1:].isalpha() and encode(context + target) == ids
            if word and hits[length] < 3:
                hits[length] += 1
                found.append(context + target)
        if min(hits.values()) == 3:
            break
    assert hits[1], "no passage of the tiny model can be right"
    return found + [" ".join(rng.choices(WORDS, k=7)) for _ in range(6)]


def test_figures_of_a_real_engine_are_those_of_transformers(tiny: Callable[[str], TinyModel], tmp_path: Path) -> None:
    """The whole way: data, prompts, engine, metrics, with windows bounded by 96 positions."""
    from flexgen_helm.text.tokenizer import Tokenizer

    model = tiny("llama")
    tokenizer = Tokenizer.from_path(model.path)
    assert tokenizer is not None

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def score(ids: list[int]) -> list[float]:
        logprobs = model.logprobs(ids)
        return [0.0, *(logprobs[i, token].item() for i, token in enumerate(ids[1:]))]

    passages = tiny_passages(model, encode, tokenizer.decode)
    data = write_data(tmp_path / "data", passages, PAGES)
    (tmp_path / "models.yaml").write_text(json.dumps({"tiny": {"path": str(model.path)}}))
    variables = {"FLEXGEN_HELM_DATA": str(data), "FLEXGEN_HELM_MODELS": str(tmp_path / "models.yaml"),
                 "FLEXGEN_HELM_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}  # fmt: skip
    runs = ["lambada:mode=accuracy,model=flexgen/tiny", "lambada:mode=perplexity,model=flexgen/tiny",
            "wikitext:model=flexgen/tiny"]  # fmt: skip
    main = "import sys; from flexgen_helm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "run", "-r", *runs, "-m", "100", "--suite", "s"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    accuracy, perplexity, pages = (
        figures(tmp_path / "benchmark_output" / "runs" / "s" / run.replace("/", "_")) for run in runs
    )

    hits, losses = 0, []
    for passage in passages:
        context, target = (len(encode(part)) for part in lambada.split_passage(passage))
        ids = encode(passage)
        target = len(ids) - context
        hits += model.logprobs(ids)[context - 1 : -1].argmax(-1).tolist() == ids[context:]
        losses.append(-sum(score(ids)[-target:]))
    assert 0 < hits < len(passages)
    assert accuracy["exact_match"] == hits / len(passages)
    assert perplexity["target_perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    expected = expected_wikitext(PAGES, encode, encode("<|endoftext|>")[0], 96, score)
    assert {name: pages[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    # Inverse: windows of another length give another figure.
    other = expected_wikitext(PAGES, encode, encode("<|endoftext|>")[0], 48, score)
    assert pages["word_perplexity"] != pytest.approx(other["word_perplexity"], rel=1e-4)
