"""The divergence of two runs equals the formula in float64 on whole rows of `transformers`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.engine.divergence import BaselineRows, RowDivergence, kl_divergence
from flexgen_helm.engine.executor import PromptToken
from flexgen_helm.errors import FlexgenError, UsageError
from tests.helpers.parity import prompts
from tests.helpers.small_disks import small_disk
from tests.helpers.tiny_models import VOCABULARY

FEW = 7


def requests(texts):
    return [GenerationRequest(prompt_token_ids=ids, max_tokens=0, echo_logprobs=True) for ids in texts]


def texts_that_share():
    """Random prompts: two equal, two with a common beginning, one with a single token."""
    several = prompts(5, 40, seed=3)
    beginning = [random.Random(1).randrange(2, VOCABULARY) for _ in range(20)]
    return [*several, several[0], [*beginning, 5, 6], [*beginning, 9], [7]]


def reference_rows(model, texts):
    """Log-probabilities [tokens, V] in float64 that predict all tokens but each text's first."""
    rows = [model.logprobs(ids).double()[: len(ids) - 1] for ids in texts]
    return torch.cat(rows).log_softmax(-1)


def direct_kl(base, changed):
    p, q = base.exp().numpy(), changed.exp().numpy()
    return (p * (np.log(p) - np.log(q))).sum(-1)


def run(engine, texts, on_logits, share=True):
    if share:
        engine.share_every_beginning()
    for result in engine.run(requests(texts), on_logits=on_logits):
        assert result.error is None


@pytest.mark.parametrize("num_rows, parts", [(10_000, False), (FEW, False), (10_000, True)])
def test_divergences_equal_the_formula_on_rows_of_transformers(tiny, tmp_path, num_rows, parts):
    """parts: of ends of prompts that share their beginnings; one prompt whole, two not at all."""
    models, texts = [tiny("llama"), tiny("llama-untied-biases")], texts_that_share()
    compared = [range(1, len(ids)) for ids in texts]
    if parts:
        compared[1:] = [range(7, 7), *(range(len(ids) - 3, len(ids)) for ids in texts[2:-1]), range(1, 1)]
    with BaselineRows(tmp_path, compared, num_rows, VOCABULARY) as kept:
        with Engine.from_pretrained(models[0].path) as engine:
            run(engine, texts, kept)
            run(engine, texts, kept)  # rows that come again, as after an out-of-memory
            same = RowDivergence(kept)
            run(engine, texts, same)
        found = RowDivergence(kept)
        with Engine.from_pretrained(models[1].path) as engine:
            run(engine, texts, found, share=parts)  # or the rows come in another order
        found.require_all()
    firsts = np.cumsum([0, *(len(ids) - 1 for ids in texts)])
    picked = [int(first) + index - 1 for first, indices in zip(firsts, compared) for index in indices]
    base, changed = (reference_rows(model, texts)[picked] for model in models)
    assert kept.num_tokens == len(picked) and len(kept.sampled) == min(num_rows, len(picked))
    exact = direct_kl(base, changed)
    assert exact.min() > 0.01  # or equal rows would do
    np.testing.assert_allclose(found.exact, exact[kept.sampled], rtol=1e-4)
    assert np.array_equal(found.same_top == 1, (base.argmax(-1) == changed.argmax(-1)).numpy())
    assert same.exact.max() == 0 and same.same_top.min() == 1


def test_a_row_that_never_comes_is_no_zero(tmp_path):
    draw = torch.Generator().manual_seed(0)
    tokens = [PromptToken((0,), index) for index in range(1, 4)]
    logits = torch.randn(3, VOCABULARY, generator=draw)
    with BaselineRows(tmp_path, [range(1, 4)], 3, VOCABULARY) as kept:
        found = RowDivergence(kept)
        kept(tokens[:2], logits[:2])
        with pytest.raises(FlexgenError, match="the baseline has no row"):
            found(tokens, logits)
        kept(tokens[2:], logits[2:])
        found(tokens[:2], logits[:2])
        with pytest.raises(FlexgenError, match="2 of 6 divergences are not finite"):
            found.require_all()
        found(tokens[2:], logits[2:])
        found.require_all()


def test_what_has_no_chance_in_the_baseline_adds_nothing():
    base = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    changed = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    assert kl_divergence(base, changed).item() == pytest.approx(np.log(2))
    assert kl_divergence(changed, base).item() == np.inf


def test_rows_that_the_disk_cannot_hold_are_refused(tmp_path):
    with small_disk(tmp_path / "small", 1 << 20) as folder:
        with pytest.raises(UsageError, match=r"the baseline's rows take .* free; name another folder"):
            BaselineRows(folder, [range(1, 301)], 300, 1_000)
        with BaselineRows(folder, [range(1, 101)], 100, 1_000) as kept:  # has its room whoever writes besides
            with pytest.raises(OSError):
                (folder / "of another program").write_bytes(bytes(700_000))
            kept([PromptToken((0,), index) for index in range(1, 101)], torch.ones(100, 1_000))
            assert kept.rows.min() == 1
