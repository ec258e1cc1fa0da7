"""Packed weights in the engine: against `transformers` with the same matrices, and on any tier."""

import copy
from dataclasses import replace

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.errors import UsageError
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.quant.packing import dequantize, quantize
from flexgen_helm.quant.precisions import FP16, PRECISIONS, Precision
from tests.helpers.offload import offloaded
from tests.helpers.parity import assert_equals_reference, prompts

PACKED = [name for name, precision in PRECISIONS.items() if precision.weights is not None]


@pytest.fixture(autouse=True)
def whole_cache(monkeypatch):
    """Only the weights are packed: `tests/kv_cache` is about the cache."""
    for name in PACKED:
        monkeypatch.setitem(PRECISIONS, name, replace(PRECISIONS[name], cache=None))


def with_packed_layers(model, precision):
    """`transformers` with every matrix replaced by what packing leaves of it; a tied table and head
    are one matrix.
    """
    formats, found = PRECISIONS[precision], copy.deepcopy(model)
    modules = {id(module.weight): (name, module) for name, module in found.reference.named_modules()
               if isinstance(module, torch.nn.Linear | torch.nn.Embedding)}  # fmt: skip
    for name, module in modules.values():
        fmt = formats.weights if ".layers." in f".{name}" else formats.tables
        if fmt is not None:
            rows, width = module.weight.shape
            module.weight.data = dequantize(quantize(module.weight.data, fmt), fmt, rows, width)
    return found


def ask():
    asked = prompts(4, 30, seed=3)
    return asked, [
        GenerationRequest(prompt_token_ids=p, max_tokens=4, echo_logprobs=True, ignore_eos=True)
        for p in asked
    ]


@pytest.mark.fast(4)
@pytest.mark.parametrize("precision", PACKED)
@pytest.mark.parametrize("variant", ["llama", "opt", "qwen3", "gemma2"])
def test_scores_equal_transformers_with_the_same_matrices(tiny, tmp_path, variant, precision):
    asked, requests = ask()
    reference = with_packed_layers(tiny(variant), precision)
    # A host multiplies them as they rest; a GPU that has room keeps copies in the compute type.
    for options in ({}, {"device": "sim", "limits": MemoryLimits(gpu=64 << 20)}):
        with Engine.from_pretrained(
            tiny(variant).path, precision=precision, offload_dir=tmp_path, **options
        ) as engine:
            packed = {name for name, weight in engine._weights.tensors.items() if weight.fmt}
            has_tables = any(not name.startswith("layers.") for name in packed)
            assert has_tables == (not options and PRECISIONS[precision].tables is not None)
            assert bool(packed) == (not options)
            for prompt, request, result in zip(asked, requests, engine.run(requests)):
                assert_equals_reference(reference, prompt, request, result)


def test_what_travels_and_lies_on_the_disk_is_packed(tiny, tmp_path):
    """Bytes of a pass are the packed sizes; the conversion happens once, and each format has its
    own files.
    """
    from flexgen_helm import Policy

    requests = [GenerationRequest(prompt_token_ids=[5, 6, 7], max_tokens=1, ignore_eos=True)]
    policy = Policy(1, 1, wg=0, wc=0, cg=0, cc=1, hg=0, hc=1)
    config = read_model_config(tiny("llama").path)[0]
    for name in ("fp16", *PACKED):
        rest = StorageSizes(config, PRECISIONS[name])
        with offloaded(
            tiny, "llama", tmp_path, policy, schedule="zigzag", precision=name
        ) as engine:
            engine.run(requests)
            read = engine.last_run["bytes"]["disk_to_cpu"]["weights"]
        head = rest.matrices["embed.tokens.weight"] if config.tied_head else rest.stages["head"][0]
        # of the prompt's tokens
        table_rows = 3 * rest.matrices["embed.tokens.weight"] // config.vocab_size
        layers = sum(rest.stages[f"layers.{i}"][0] for i in range(config.num_layers))
        assert read in (
            layers + head + table_rows,
            layers + head + rest.matrices["embed.tokens.weight"],
        )
    folders = [path for path in tmp_path.iterdir() if path.name.startswith("weights-")]
    assert len(folders) == 1 + len({PRECISIONS[name].weights_label for name in PACKED}) == 4


def test_precisions_have_their_own_fingerprints_and_labels(tiny, tmp_path):
    found = set()
    for name in PRECISIONS:
        with Engine.from_pretrained(
            tiny("llama").path, precision=name, offload_dir=tmp_path
        ) as engine:
            found.add(engine.fingerprint)
            assert engine.precision == name
    assert len(found) == len(PRECISIONS) == len({p.label for p in PRECISIONS.values()})
    assert FP16.format_of("layers.0.attn.q.weight") is None
    ours = PRECISIONS["4bit"]
    assert ours.format_of("layers.0.mlp.experts.3.up.weight") == ours.weights
    assert (
        ours.format_of("layers.0.mlp.router.weight")
        is None
        is ours.format_of("embed.tokens.weight")
    )
    eight = PRECISIONS["8bit"]
    assert eight.format_of("layers.0.mlp.router.weight") is None
    assert (
        eight.format_of("embed.tokens.weight") == eight.format_of("head.lm.weight") == eight.tables
    )
    with pytest.raises(UsageError, match="axis 'in'"):
        Precision("rows apart", tables=eight.weights)


@pytest.mark.parametrize("model", ["smollm2-135m", "opt-125m", "llama-3-8b"])
def test_eight_bits_take_at_most_54_percent_of_the_bytes(model):
    """Of every matrix, tables and head among them; 4 bits leave these as they are."""
    from flexgen_helm.checkpoint.catalog import CATALOG

    config = CATALOG[model].config
    halves, eight, four = (
        StorageSizes(config, PRECISIONS[name]).matrices for name in ("fp16", "8bit", "4bit")
    )
    assert all(eight[name] <= 0.54 * num_bytes for name, num_bytes in halves.items())
    assert four["embed.tokens.weight"] == halves["embed.tokens.weight"]
    assert four["layers.0.attn.q.weight"] == 4.5 / 16 * halves["layers.0.attn.q.weight"]
