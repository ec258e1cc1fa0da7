"""Our HELM tokenizer against HELM's own Hugging Face one, on the same files."""

import json
from collections.abc import Callable

import pytest
from helm.benchmark.window_services.default_window_service import DefaultWindowService
from helm.common.cache import BlackHoleCacheConfig
from helm.common.request import Request
from helm.common.tokenization_request import DecodeRequest, TokenizationRequest
from helm.proxy.retry import NonRetriableException
from helm.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer

from flexgen_helm.errors import UsageError
from flexgen_helm.plugin.context import PluginContext, get_context, set_context
from flexgen_helm.plugin.convert import to_generation_request, to_helm_request
from flexgen_helm.plugin.tokenizer_client import FlexgenTokenizer, FlexgenWindowService
from flexgen_helm.service.models import ModelArguments, PromptEncoder
from tests.helpers.fake_engine import FakeTokenizer, fake_context
from tests.helpers.tokenizers_by_family import FAMILIES

# 'gpt' in the name makes HELM decode each token by itself, the one of its rules that keeps spaces
# right.
NAME = "flexgen/gpt-like"
TEXTS = [
    "Is 24 even or odd?\nAnswer: Even",
    " leading space, trailing space ",
    "tabs\tand\n\nnewlines",
    "naïve café ☃ 行星运转 \U0001f600",
    "<|endoftext|>after a special token",
    "",
    "don't 'quote'  twice",
]


@pytest.fixture(scope="module", params=["gpt2", "phi3"])
def pair(request, tmp_path_factory):
    """Ours and HELM's, of one folder."""
    folder = FAMILIES[request.param].write(tmp_path_factory.mktemp("tokenizer") / "model")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    previous, model = set_context(PluginContext()), ModelArguments(NAME, str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_context(), "find_model", lambda name, arguments=None: model)
        theirs = HuggingFaceTokenizer(
            BlackHoleCacheConfig(), f"{NAME}-{request.param}", str(folder)
        )
        yield request.param, FlexgenTokenizer(NAME), theirs, get_context().models.encoder(model)
    set_context(previous)


@pytest.mark.parametrize("text", TEXTS)
def test_same_ids_and_texts_as_helm(pair, text):
    kind, *both, _ = pair

    def tokens(**options):
        names = (NAME, f"{NAME}-{kind}")
        return [
            one.tokenize(TokenizationRequest(text, n, **options)).raw_tokens
            for one, n in zip(both, names)
        ]

    ids = tokens(encode=True)
    assert ids[0] == ids[1] and all(type(value) is int for value in ids[0])
    for length in (0, 1, 5, 10**6):
        short = tokens(encode=True, truncation=True, max_length=length)
        assert short[0] == short[1]
        decoded = [one.decode(DecodeRequest(short[0], f"{NAME}-{kind}")).text for one in both]
        assert decoded[0] == decoded[1]
    strings, helms = tokens()
    assert len(strings) == len(helms) == len(ids[0])
    # there HELM's own spelling is right but for tokens that are no whole character
    if kind == "gpt2":
        assert [s for s, h in zip(strings, helms) if h not in (s, "�") and "�" not in h] == []
        assert all(s.startswith("bytes:\\x") for s, h in zip(strings, helms) if "�" in h)


def test_text_that_is_no_unicode_is_refused_and_not_retried(pair):
    _, ours, _, encoder = pair
    with pytest.raises(NonRetriableException, match="not valid Unicode"):
        ours.tokenize(TokenizationRequest("\ud800", NAME))
    with pytest.raises(NonRetriableException, match="not valid Unicode"):
        to_generation_request(Request(prompt="\ud800"), encoder, 4096)


def test_the_most_recent_texts_are_encoded_once_and_the_cache_is_bounded(monkeypatch):
    texts = []

    class Counting(FakeTokenizer):
        def encode(self, text, add_special_tokens=True):
            texts.append(text)
            return super().encode(text, add_special_tokens)

    monkeypatch.setattr("flexgen_helm.service.models.MAX_CACHED_TEXTS", 2)
    encoder = PromptEncoder(Counting())
    assert [encoder.encode(text) for text in ("ab", "cd", "ab")] == [(97, 98), (99, 100), (97, 98)]
    encoder.encode("ef")  # the least recently used one goes
    encoder.encode("ab"), encoder.encode("cd")
    assert texts == ["ab", "cd", "ef", "cd"]


class Service:
    """HELM's TokenizerService on the fake."""

    def __init__(self, adapter):
        self.tokenize, self.decode = adapter.tokenize, adapter.decode


Windows = Callable[..., tuple[FlexgenWindowService, DefaultWindowService, PluginContext]]


@pytest.fixture
def windows(monkeypatch, use_context):
    """Make our window service and HELM's own, of a length, on a fake tokenizer."""

    def make(length, **options):
        context = use_context(fake_context(**options))
        monkeypatch.setattr(
            context, "find_model", lambda name, arguments=None: ModelArguments(name, name)
        )
        service = Service(FlexgenTokenizer("flexgen/x"))
        sizes = dict(max_sequence_length=length, max_request_length=length + 1)
        return (
            FlexgenWindowService(service, "flexgen/x", **sizes),
            DefaultWindowService(service, "flexgen/x", **sizes),
            context,
        )

    return make


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_window_reserves_the_place_of_bos(adds_bos, windows):
    window, plain, _ = windows(10, adds_bos=adds_bos)
    assert plain.fits_within_context_window("a" * 8, 3) and not plain.fits_within_context_window(
        "a" * 9, 3
    )
    assert window.fits_within_context_window("a" * 8, 3) is not adds_bos
    assert window.fits_within_context_window("\x01" + "a" * 7, 3)
    assert window.truncate_from_right("a" * 20, 3) == "a" * (7 if adds_bos else 8)
    assert window.truncate_from_right("\x01" + "a" * 20, 3) == "\x01" + "a" * 7


@pytest.mark.parametrize("wanted", [11, 2100])
def test_an_answer_that_fills_the_window_is_refused_and_does_not_loop(wanted, windows):
    """HELM's loop takes characters away from an empty text for ever."""
    window = windows(10)[0]
    said = (
        "the window of flexgen/x has 11 tokens, which leaves no prompt beside an answer of "
        f"{wanted:,};"
    )
    with pytest.raises(UsageError, match=said):
        window.truncate_from_right("a" * 20, wanted)
    assert (
        window.truncate_from_right("a" * 20, 10) == "a" and window.truncate_from_right("", 5) == ""
    )


def test_the_window_reserves_the_tokens_of_the_template(windows):
    window, _, context = windows(40, adds_bos=True, chat_template="yes")
    added = len("\x01<user><assistant>")
    assert window.fits_within_context_window("a" * (41 - 3 - added), 3)
    assert not window.fits_within_context_window("a" * (41 - 3 - added + 1), 3)
    assert window.truncate_from_right("a" * 60, 3) == "a" * (41 - 3 - added)
    # A scored prompt gets BOS alone.
    assert window.fits_within_context_window("a" * 40) and not window.fits_within_context_window(
        "a" * 41
    )
    longest = Request(prompt=window.truncate_from_right("a" * 60, 3), temperature=0, max_tokens=3)
    prepared = to_helm_request(longest, ModelArguments("flexgen/x", "x"), context.models)
    assert len(prepared.request.prompt_token_ids or ()) + prepared.request.max_tokens == 41
