"""Two models, one after the other: every figure equals a direct formula in float64 on whole rows of
`transformers`.
"""

import math
import os
import random
import shutil
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flexgen_helm import Engine, MemoryLimits
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine import divergence
from flexgen_helm.engine.baseline import Baseline
from flexgen_helm.engine.compared_prompts import ComparedPrompts
from flexgen_helm.engine.divergence import kl_divergence, require_comparable
from flexgen_helm.errors import FlexgenError, MemoryLimitError, RequestError, UsageError
from tests.helpers.model_folders import edit_config
from tests.helpers.parity import prompts
from tests.helpers.tiny_models import (
    VARIANTS,
    VOCABULARY,
    TinyModel,
    gemma_config,
    llama_config,
    save_random,
)

# Two models of each family, that differ in their weights.
FAMILIES = {
    "llama": VARIANTS["llama"],
    "gemma2": lambda: gemma_config("Gemma2Config"),
    "gpt2": VARIANTS["gpt2"],
}
STREAMED = {"policy": "2x2,0,0,0,100,0,0", "schedule": "zigzag"}
PASSES = {"policy": "3x2,0,0,0,100,0,100"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            folders = [tmp_path_factory.mktemp(family) for _ in range(2)]
            made[family] = [
                TinyModel(path, save_random(path, FAMILIES[family](), n))
                for n, path in enumerate(folders)
            ]
        return made[family]

    return get


def texts_that_share():
    """Random prompts: two equal, two with a common beginning, one with a single token."""
    several = prompts(5, 40, seed=3)
    beginning = [random.Random(1).randrange(2, VOCABULARY) for _ in range(20)]
    return [*several, several[0], [*beginning, 5, 6], [*beginning, 9], [7]]


def whole(texts):
    return ComparedPrompts(texts, [range(1, len(ids)) for ids in texts], range(len(texts)))


def ends(texts):
    """One prompt whole, two not at all, the last three tokens of the others."""
    compared = [range(max(1, len(ids) - 3), len(ids)) for ids in texts]
    compared[0], compared[1], compared[-1] = range(1, len(texts[0])), range(7, 7), range(1, 1)
    return ComparedPrompts(texts, compared, range(len(texts)))


def compare(models, *parts, share=True, by_layer=False, options=({}, {})):
    with TemporaryDirectory() as folder:
        opened = [
            partial(Engine.from_pretrained, path, **{"device": "cpu", **more})
            for path, more in zip(models, options)
        ]
        with opened[0]() as engine:
            if share:
                engine.share_every_beginning()
            base = Baseline(parts, engine.model_config, EngineConfig(offload_dir=folder), by_layer)
            base.fill(engine)
        with opened[1]() as engine:
            found = divergence.compare(base, engine)
        base.remove()
        assert not os.listdir(folder)
    return found


def formula(references, asked, width=None):
    """Log-probabilities, KL and equal top tokens of the compared tokens, from whole rows in
    float64, by definition.
    """
    columns = []
    for ids, compared in zip(asked.token_ids, asked.compared):
        with torch.no_grad():
            logits = [
                model.double()(torch.tensor([list(ids)])).logits[0].numpy() for model in references
            ]
        for index in compared:
            p, q = (rows[index - 1] - rows[index - 1].max() for rows in logits)
            p, q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
            kl = math.fsum(math.exp(a) * (a - b) for a, b in zip(p[:width], q[:width]))
            columns.append((p[ids[index]], q[ids[index]], kl, float(p.argmax() == q.argmax())))
    return np.array(columns).T


def assert_equal(found, expected):
    np.testing.assert_allclose(found[:2], expected[:2], atol=1e-4)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-3, atol=1e-6)
    assert np.array_equal(found[3], expected[3])
    perplexities = [
        [math.exp(-math.fsum(row) / len(row)) for row in values[:2]] for values in (found, expected)
    ]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-5)


@pytest.mark.parametrize(
    "options", [({}, {}), (STREAMED, {}), (PASSES, PASSES)], ids=["memory", "one", "both"]
)
@pytest.mark.parametrize("asked", [whole, ends])
@pytest.mark.parametrize("family", FAMILIES)
def test_figures_equal_the_formula_on_rows_of_transformers(pair, tmp_path, family, asked, options):
    """Also where one model is in memory and the other one on the disk, and batches are smaller than
    they could be.
    """
    models, tokens = pair(family), asked(texts_that_share())
    folder = {"offload_dir": tmp_path, "limits": MemoryLimits(cpu=1 << 26, disk=1 << 28)}
    (found,) = compare(
        [model.path for model in models], tokens, options=[{**folder, **more} for more in options]
    )
    expected = formula([model.reference for model in models], tokens)
    assert expected[2].min() > 0.01  # or equal rows would do
    assert_equal(found.values, expected)


@pytest.mark.parametrize("options", [{}, STREAMED, PASSES, {"precision": "4bit"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_at_no_distance_from_itself(pair, tmp_path, family, options):
    path = pair(family)[0].path
    folder = {"offload_dir": tmp_path, "limits": MemoryLimits(cpu=1 << 26, disk=1 << 28), **options}
    (found,) = compare(
        [path, path], whole(texts_that_share()), by_layer=True, options=(folder, folder)
    )
    base, logprobs, kl, same = found.values
    assert (
        np.array_equal(base, logprobs)
        and not kl.any()
        and same.all()
        and found.layers == (0.0,) * len(found.layers)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_relative_errors_of_layers_equal_those_of_transformers(pair, family):
    models, texts = pair(family), prompts(6, 40, seed=8)
    (found,) = compare([model.path for model in models], whole(texts), by_layer=True)
    squares = np.zeros((2, len(found.layers)))
    for ids in texts:
        states = [hidden_states(model.reference.double(), ids) for model in models]
        squares += [
            [((b - a) ** 2).sum() for a, b in zip(*states)],
            [(a**2).sum() for a in states[0]],
        ]
    np.testing.assert_allclose(found.layers, np.sqrt(squares[0] / squares[1]), rtol=1e-5)


def hidden_states(model, ids):
    """After the embedding and each layer, before the last norm, which `transformers` has in its
    last state.
    """
    (layers,) = (
        part for name, part in model.named_modules() if name in ("model.layers", "transformer.h")
    )
    last = []
    hook = layers[-1].register_forward_hook(
        lambda module, given, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    return [
        state[0].numpy() if state.ndim == 3 else state.numpy() for state in (*states[:-1], last[0])
    ]


@pytest.mark.parametrize("precision", ["8bit", "4bit", "4bit-s"])
def test_precisions_whose_caches_share_other_beginnings_or_none(pair, precision):
    """A quantized cache shares multiples of groups, a sparse one nothing."""
    (model, _), beginning = pair("llama"), prompts(1, 70, seed=4)[0][:1] * 66
    texts = [[*beginning, *ids] for ids in prompts(4, 20, seed=5)]
    options = {}, {"precision": precision}
    plain = [
        compare([model.path] * 2, whole(texts), share=share, options=options)[0].values
        for share in (True, False)
    ]
    np.testing.assert_allclose(plain[0][0], plain[1][0], atol=1e-5)
    assert plain[0][2].max() > 1e-5


def test_rows_of_padding_count_in_their_own_model_alone(pair, tmp_path):
    models = pair("llama")
    config = llama_config(vocab_size=VOCABULARY + 32)
    wider = TinyModel(tmp_path, save_random(tmp_path, config, 3))
    for first, second in ((models[0], wider), (wider, models[0])):
        tokens = whole(texts_that_share())
        (found,) = compare([first.path, second.path], tokens)
        assert_equal(
            found.values,
            formula([first.reference, second.reference], tokens, VOCABULARY).clip(min=-np.inf),
        )


def test_parts_have_the_figures_that_they_have_alone(pair):
    paths, texts = [model.path for model in pair("llama")], texts_that_share()
    parts = [whole(texts[:3]), whole(texts[3:])]
    for found, part in zip(compare(paths, *parts, by_layer=True), parts):
        (alone,) = compare(paths, part, by_layer=True)
        np.testing.assert_allclose(found.values, alone.values, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found.layers, alone.layers, rtol=1e-4)


def test_equal_beginnings_have_equal_numbers_and_no_others():
    texts = texts_that_share()
    numbers = whole(texts).state_numbers()
    of_beginning = {}
    for ids, known in zip(texts, numbers):
        assert len(ids) == len(known)
        for index, number in enumerate(known):
            assert of_beginning.setdefault(tuple(ids[: index + 1]), number) == number
    assert sorted(of_beginning.values()) == [*range(len(of_beginning))]


# What goes wrong.


@pytest.fixture
def options(tmp_path):
    return EngineConfig(offload_dir=tmp_path)


@pytest.fixture
def engines(pair):
    paths = [model.path for model in pair("llama")]
    with (
        Engine.from_pretrained(paths[0], device="cpu") as first,
        Engine.from_pretrained(paths[1], device="cpu") as second,
    ):
        yield first, second


def test_batches_that_memory_does_not_take_are_divided(engines, options, monkeypatch):
    """Rows and states that were seen before memory ran out are seen again, and count once."""
    asked = whole([ids * 40 for ids in prompts(40, 2, seed=1)])
    found = []
    for runs_out in (False, True):
        with monkeypatch.context() as patch:
            base = Baseline([asked], engines[0].model_config, options, True)
            for engine in engines if runs_out else ():
                fail_once(engine, MemoryError(), patch)
            base.fill(engines[0])
            found += divergence.compare(base, engines[1])
            base.remove()
            assert [engine.last_run["halvings"] for engine in engines] == [int(runs_out)] * 2
    np.testing.assert_allclose(found[0].values, found[1].values, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[0].layers, found[1].layers, rtol=1e-4)


def fail_once(engine, error, patch):
    """Let an engine fail at its first visit of layer 2."""
    decoder, visits = engine._model.decoder, []
    compute = decoder.layer

    def broken(weights, number, *arguments):
        if number == 2 and not visits:
            visits.append(1)
            raise error
        return compute(weights, number, *arguments)

    patch.setattr(decoder, "layer", broken, raising=False)


def test_a_prompt_that_only_the_second_cannot_take_is_refused(pair, tmp_path):
    shutil.copytree(pair("llama")[0].path, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, max_position_embeddings=30)
    with pytest.raises(RequestError, match="the model's window of 30 tokens"):
        compare([pair("llama")[0].path, tmp_path], whole([[5, 6, 7], [*range(2, 42)]]))


def test_values_that_are_not_finite_are_refused(pair, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(divergence, "kl_divergence", lambda p, q: torch.full((len(p),), torch.inf))
        with pytest.raises(FlexgenError, match="90 of 360 compared values are not finite"):
            compare([model.path for model in pair("llama")], whole([[*range(2, 93)]]))


def test_logits_that_the_disk_lost_are_noticed(engines, options):
    base = Baseline([whole([[*range(2, 93)]])], engines[0].model_config, options)
    base.fill(engines[0])
    base.logits[45] = 0
    with pytest.raises(FlexgenError, match="the stored logits are not those that were computed"):
        divergence.compare(base, engines[1])


@pytest.mark.parametrize("by_layer", [False, True])
def test_the_room_of_logits_is_known_before_anything_is_computed(engines, options, by_layer):
    asked, config = whole([[*range(2, 93)]] * 2), engines[0].model_config
    states = 91 * (config.num_layers + 1) * config.hidden_elements * by_layer
    base = Baseline([asked], config, options, by_layer)
    assert (
        base.num_bytes == base.elements.nbytes == base.logits.nbytes + base.states.nbytes + 4 * 180
    )
    assert base.logits.nbytes + base.states.nbytes == 4 * (180 * VOCABULARY + states)
    base.remove()
    limited = replace(options, limits=MemoryLimits(disk=base.num_bytes + 5))
    exact = Baseline([asked], config, limited, by_layer)
    assert exact.beside(limited).limits == MemoryLimits(disk=5)
    exact.remove()
    assert base.beside(options).limits.disk is None
    limited = replace(options, limits=MemoryLimits(disk=base.num_bytes - 1))
    with pytest.raises(
        MemoryLimitError, match=("what is compared take .* with --offload-dir, raise --disk")
    ):
        Baseline([asked], config, limited, by_layer)


# What cannot be compared, before weights are read.


class Words:
    def __init__(self, words):
        self.words = words

    def token_bytes(self, token):
        return self.words[token].encode() if token < len(self.words) else b""


def opened(words, rows, layers=3, width=48):
    config = SimpleNamespace(vocab_size=rows, num_layers=layers, hidden_elements=width)
    return SimpleNamespace(config=config), None if words is None else Words(words.split())


@pytest.mark.parametrize(
    "first, second, says",
    [
        (
            opened("a b c", 4),
            opened("a b d", 4),
            "token 2 is 'c' in the first and 'd' in the second",
        ),
        (
            opened("a b c", 3),
            opened("a b", 2),
            "token 2 is 'c' in the first and none in the second",
        ),
        (opened("a b c", 4), opened("a b", 4), None),  # a name of a row that the other one has too
        (opened("a b", 4), opened("a b c", 3), None),
        (opened("a b", 2), opened("a b", 99), None),
        (opened(None, 4), opened("a b c", 4), None),
        (
            opened(None, 4),
            opened("a b c", 5),
            "have 4 and 5 tokens, and not both have tokenizer files",
        ),
    ],
)
def test_vocabularies(first, second, says):
    if says is None:
        return require_comparable([first, second], True)
    with pytest.raises(UsageError, match=says):
        require_comparable([first, second], False)


@pytest.mark.parametrize("shape", [(4, 48), (3, 64)])
def test_layers_that_do_not_match(shape):
    first, second = opened("a", 2), opened("a", 2, *shape)
    require_comparable([first, second], False)
    with pytest.raises(
        UsageError, match=(f"the models have 3 layers of 48 and {shape[0]} layers of {shape[1]}")
    ):
        require_comparable([first, second], True)


def test_what_has_no_chance_in_the_baseline_adds_nothing():
    base = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    changed = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    assert kl_divergence(base, changed).item() == pytest.approx(np.log(2))
    assert kl_divergence(changed, base).item() == np.inf
