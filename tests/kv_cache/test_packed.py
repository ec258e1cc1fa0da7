"""The packed KV cache: what every query sees, against a slow direct formula, and the same on every
path.
"""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.engine.attention_metadata import BatchPrompt, LayerAttention
from flexgen_helm.engine.segment_attention import attend_prompt
from flexgen_helm.errors import NumericalError, UsageError
from flexgen_helm.hardware.device_profile import simulated_gpu
from flexgen_helm.hardware.profile import Disk, Link
from flexgen_helm.kv_cache.codec import QuantizedCodec
from flexgen_helm.models.attention import AttentionConfig
from flexgen_helm.models.config import Window
from flexgen_helm.models.decoder import Decoder
from flexgen_helm.planner.affine import fraction_vector
from flexgen_helm.planner.cost_model import block_costs
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.policy import BlockShape
from flexgen_helm.planner.schedules import ZIGZAG
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant import precisions
from flexgen_helm.quant.packing import dequantize, quantize
from flexgen_helm.quant.precisions import PRECISIONS, CacheFormat, Precision
from flexgen_helm.scheduling.sequence import Sequence, SequenceKind
from tests.helpers.offload import MIB, offloaded
from tests.helpers.packed_caches import FORMATS, LARGEST, MEAN
from tests.helpers.parity import prompts
from tests.helpers.planning_problems import LAPTOP
from tests.helpers.tiny_models import llama_config, save_random


@pytest.fixture(autouse=True)
def formats(monkeypatch):
    """Precisions whose cache alone is packed, in groups so small that tiny prompts fill some."""
    monkeypatch.setattr(precisions, "_PLAIN_GROUP", 16)
    for name, fmt in FORMATS.items():
        monkeypatch.setitem(PRECISIONS, name, Precision(name, cache=fmt))


def packed_tokens(x, fmt):
    """What packing leaves of x [S, Hk, D], by the definition."""
    if fmt is None:
        return x
    tokens, heads, dim = x.shape
    if fmt.axis == "in":
        return dequantize(quantize(x.reshape(-1, dim), fmt), fmt, tokens * heads, dim).view(x.shape)
    whole = tokens // fmt.group_size * fmt.group_size
    flat = x.reshape(tokens, heads * dim)
    if not whole:
        return x
    return torch.cat(
        (dequantize(quantize(flat[:whole], fmt), fmt, whole, heads * dim), flat[whole:])
    ).view(x.shape)


def first_visible(position, start, window):
    """The first token that a query sees, counted from `start`."""
    if window is None:
        return 0
    absolute = start + position
    first = (
        absolute - absolute % window.tokens if window.is_chunked else absolute - window.tokens + 1
    )
    return max(0, first - start)


def direct(q, k, v, fmt, scale, slopes, start, window):
    """Each query alone, in double precision: keys and values before its boundary packed, the others
    as they are.
    """
    k_packed, v_packed = packed_tokens(k, fmt.keys), packed_tokens(v, fmt.values)
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for p in range(q.shape[0]):
        border = fmt.num_quantized(p)
        first = first_visible(p, start, window)
        keys = (
            torch.cat((k_packed[:border], k[border : p + 1]))[first:]
            .double()
            .repeat_interleave(group, 1)
        )
        values = (
            torch.cat((v_packed[:border], v[border : p + 1]))[first:]
            .double()
            .repeat_interleave(group, 1)
        )
        scores = torch.einsum("hd,shd->hs", q[p].double(), keys) * scale
        if slopes is not None:
            scores = scores + slopes[:, None].double() * (torch.arange(first, p + 1) - p)
        older = max(0, border - first)
        for head in range(k.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            order = torch.softmax(scores[mine, :older], -1).sum(0).argsort(descending=True)
            dropped = order[math.ceil(Fraction(str(fmt.value_share)) * older) :]
            scores[mine, dropped] = -math.inf
        out[p] = torch.einsum("hs,shd->hd", torch.softmax(scores, -1), values).float()
    return out


@pytest.mark.parametrize("name", FORMATS)
@given(
    st.integers(1, 90),
    st.integers(0, 60),
    st.none() | st.builds(Window, st.sampled_from([1, 7, 40]), st.booleans()),
    st.booleans(),
    st.integers(0, 5),
)
@settings(max_examples=16)
def test_a_prompt_sees_what_the_definition_says(name, tokens, start, window, alibi, seed):
    fmt, draw = FORMATS[name], torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, heads, 16, generator=draw) for heads in (4, 2, 2))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    codec = QuantizedCodec(fmt, 2, 16, torch.float32)
    sequence = Sequence(SequenceKind.PROMPT, (), [1] * tokens, tokens, start)
    prompt = BatchPrompt(sequence, slice(0, tokens))
    config, cache = AttentionConfig(0.25, slopes=slopes), Mock(codec=codec)
    ((_, older),) = codec.encode_prompts(k, v, [(slice(0, tokens), False)])
    at = LayerAttention(Mock(), 0, window, config, cache)
    found, _ = attend_prompt(at, prompt, q, (k, v), older)
    expected = direct(q, k, v, fmt, 0.25, slopes, start, window)
    assert (found - expected).abs().max() < 1e-5
    if tokens > 40 and window is None:
        wider = replace(fmt, residual_window=fmt.residual_window + fmt.group_tokens)
        moved = direct(q, k, v, wider, 0.25, slopes, start, window)
        assert (found - moved).abs().max() > 1e-3  # the comparison would notice another window


@given(st.sampled_from(list(FORMATS)), st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=20)
def test_token_groups_come_back(name, groups, seed):
    fmt = FORMATS[name]
    codec = QuantizedCodec(fmt, 3, 16, torch.float32)
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(groups * codec.group_tokens, 3, 16, generator=draw) for _ in range(2))
    planes = codec.encode(k, v)
    assert all(
        plane.shape == (groups, spec.unit_bytes) for plane, spec in zip(planes, codec.planes)
    )
    stored = tuple(plane[None] for plane in planes)
    decoded = [codec.decode(half, plane)[0].transpose(0, 1) for half, plane in enumerate(stored)]
    sides = zip(decoded, codec.round_trip(k, v), (k, v), (fmt.keys, fmt.values))
    for found, seen, x, part in sides:
        assert torch.equal(found, packed_tokens(x, part)) and torch.equal(seen, found)
    if name != "paper":
        assert codec.unit_bytes == pytest.approx(
            2 * codec.group_tokens * 48 * fmt.bytes_per_value(4)
        )
        keys = codec.planes[0].unit_bytes
        assert codec.fetched_bytes == (codec.unit_bytes if fmt.value_share == 1 else keys)
    if fmt.value_share < 1:
        tokens = torch.randint(0, groups * codec.group_tokens, (2, 3, 7), generator=draw)
        picked = codec.decode_selected(
            codec.select_values(torch.stack((planes[1], planes[1])), tokens)
        )
        for row, head in itertools.product(range(2), range(3)):
            assert torch.equal(picked[row, head], decoded[1][tokens[row, head], head])


def asked(seed=0, count=7, most=30):
    return [
        GenerationRequest(prompt_token_ids=prompt, max_tokens=most, ignore_eos=True)
        for prompt in prompts(count, 60, seed)
    ]


def rescored(requests, results):
    whole = [[*r.prompt_token_ids, *a.completions[0].token_ids] for r, a in zip(requests, results)]
    return [
        GenerationRequest(prompt_token_ids=ids, max_tokens=0, echo_logprobs=True) for ids in whole
    ]


def differences(requests, results, scored):
    """Between the log-probabilities that were drawn with, and those of the same tokens in a
    prompt.
    """
    found = []
    for request, result, score in zip(requests, results, scored, strict=True):
        assert result.error is None and score.error is None
        told = score.prompt_logprobs[len(request.prompt_token_ids) :]
        found += [abs(x - y) for x, y in zip(result.completions[0].logprobs, told, strict=True)]
    return sum(found) / len(found), max(found)


def assert_same(requests, results, scored):
    mean, largest = differences(requests, results, scored)
    assert mean < MEAN and largest < LARGEST, (mean, largest)


@pytest.mark.fast(6)
@pytest.mark.parametrize("name", [*FORMATS, "4bit", "paper-4bit"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_value_that_cannot_be_packed_fails_its_request_alone(
    tiny, tmp_path, monkeypatch, name, value
):
    """1e30 is finite, but beyond every scale; what it leads to is a number or an error, of that
    request.
    """
    honest = Decoder.embed

    def broken(self, weights, token_ids, positions):
        at = (token_ids.on_device == 77) & (
            positions.on_device == 1
        )  # in the prompt only: others may draw that token later
        return honest(self, weights, token_ids, positions).masked_fill(at[:, None], value)

    monkeypatch.setattr(Decoder, "embed", broken)
    clean = [GenerationRequest(prompt_token_ids=[100 + (7 * i + 3 * j) % 200 for j in range(70)], max_tokens=20,
                               ignore_eos=True) for i in range(4)]  # fmt: skip
    bad = GenerationRequest(prompt_token_ids=[5, 77, *clean[0].prompt_token_ids], max_tokens=20)
    with Engine.from_pretrained(tiny("llama").path, precision=name, offload_dir=tmp_path) as engine:
        expected = engine.run(clean)
        found = engine.run([*clean[:2], bad, *clean[2:]])
    failed = found.pop(2)
    assert [r.completions[0].token_ids for r in found] == [
        r.completions[0].token_ids for r in expected
    ]
    if not math.isfinite(value):
        assert isinstance(failed.error, NumericalError)


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", [*FORMATS, "4bit", "4bit-s", "paper-4bit"])
@pytest.mark.parametrize("variant", ["llama", "gemma2", "bloom"])
def test_decoding_sees_what_scoring_sees(tiny, tmp_path, variant, name):
    """Log-probabilities of drawn tokens, from the cache, are those of the same tokens in a prompt,
    without one.
    """
    requests = asked()
    with Engine.from_pretrained(tiny(variant).path, precision=name, offload_dir=tmp_path) as engine:
        results = engine.run(requests)
        scored = engine.run(rescored(requests, results))
        assert_same(requests, results, scored)
        engine.ledger.check({"weights": engine.ledger.in_use})
    if name in FORMATS:
        with Engine.from_pretrained(tiny(variant).path) as engine:
            mean, _ = differences(requests, results, engine.run(rescored(requests, results)))
            assert mean > 5 * MEAN  # another view is noticed


def test_sparse_attention_brings_only_the_values_it_takes(tiny, tmp_path, monkeypatch):
    """Over the link to host memory: the residual window and all older keys, and of the values the
    share.
    """
    brought = {}
    prompt = [3 + i % 50 for i in range(85)]
    for share in (0.1, 1.0):
        fmt = replace(FORMATS["sparse channels"], value_share=share)
        monkeypatch.setitem(PRECISIONS, "share", Precision("share", cache=fmt))
        limits = MemoryLimits(gpu=64 * MIB, cpu=64 * MIB)
        with offloaded(
            tiny,
            "opt",
            tmp_path,
            Policy(1, 1, 1, 0, 0, 1, 1, 0),
            device="sim",
            limits=limits,
            precision="share",
        ) as engine:
            (result,) = engine.run(
                [GenerationRequest(prompt_token_ids=prompt, max_tokens=9, ignore_eos=True)]
            )
            assert result.error is None
            brought[share] = engine.last_run["bytes"]["cpu_to_gpu"]["cache"]
            codec = QuantizedCodec(
                FORMATS["sparse channels"],
                engine.model_config.num_kv_heads,
                engine.model_config.head_dim,
                torch.float32,
            )
            layers, token_value = (
                engine.model_config.num_layers,
                engine.model_config.kv_size * (4 + 16 / 8) / 8,
            )
    keys = values = 0
    for position in range(85, 93):
        older = codec.num_stored(position)
        keys += older // codec.group_tokens * codec.fetched_bytes
        values += math.ceil(Fraction("0.1") * older) * token_value
    windows = 8 * codec.window_tokens * 2 * codec.token_elements * 4
    assert brought[0.1] == layers * (windows + keys + values)
    assert brought[1.0] - layers * windows > 1.5 * layers * (keys + values)


@pytest.mark.parametrize("share", [0.0, 1.5, -0.1])
def test_a_share_of_values_is_a_share(share):
    with pytest.raises(UsageError, match="share"):
        CacheFormat(None, None, 4, value_share=share)
    with pytest.raises(UsageError, match="groups of tokens"):
        replace(FORMATS["paper"], value_share=0.1)


@pytest.mark.parametrize("name", ["4bit-cache", "paper-4bit"])
@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_an_offloaded_cache_moves_what_the_plan_counts(tmp_path, tier, name):
    """Of 8 prompts of 256 tokens and 65 new ones each, over which the groups of 64 end evenly."""
    policy = Policy(8, 1, 1, 0, 0, float(tier == "cpu"), 1, 0)
    count, prompt, output = 8, 256, 65
    requests = [
        GenerationRequest(
            prompt_token_ids=[5 + i, *range(10, 9 + prompt)], max_tokens=output, ignore_eos=True
        )
        for i in range(count)
    ]
    limits = MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB)
    save_random(
        tmp_path / "model",
        llama_config(max_position_embeddings=prompt + output, head_dim=64),
        seed=1,
    )
    settings = dict(
        policy=policy, offload_dir=tmp_path / "disk", device="sim", limits=limits, precision=name
    )
    with Engine.from_pretrained(tmp_path / "model", **settings) as engine:
        assert all(result.error is None for result in engine.run(requests))
        moved, config = engine.last_run["bytes"], engine.model_config
        engine.ledger.check({"weights": engine.ledger.in_use})
    second = replace(
        simulated_gpu(LAPTOP, (1, 1)), link=Link(1, 1, 1, 1), disk=Disk(1 << 40, 1, 1, access_s=0)
    )
    problem = planning_problem(
        config, second, Workload.uniform(prompt, output, count), precision=name, limits=limits
    )
    costs = block_costs(problem, BlockShape(count, 1, ZIGZAG), resident=True)
    shares = fraction_vector(policy, True)
    names = {"to_gpu": "cpu_to_gpu", "to_cpu": "gpu_to_cpu"}
    names |= {"disk_read": "disk_to_cpu", "disk_write": "cpu_to_disk"} if tier == "disk" else {}
    for resource, link in names.items():
        planned = float(
            (costs.prefill[resource] + costs.decode_passes * costs.decode[resource]) @ shares
        )
        assert moved[link]["cache"] == pytest.approx(planned, rel=0.05)
