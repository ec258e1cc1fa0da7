"""Memory limits are promises: a plan refuses beforehand, with the missing bytes, or every request
gets its answer.

Models, limits, schedules, precisions and requests are random. Weights exceed most limits; the disk
holds every cache.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.engine.executor import Executor
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.offload.ledger import Ledger
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.quant.precisions import precision_named
from tests.helpers.offload import workload
from tests.helpers.parity import assert_same

_SHARED = dict(max_position_embeddings=512, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2)
_LLAMA = dict(
    _SHARED,
    num_attention_heads=8,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    hidden_act="silu",
)
# 10 to 30 MB each: several times the smallest staging ring. The last one keeps states of sequences.
MODELS: dict[str, dict[str, Any]] = {
    "opt": dict(
        _SHARED, architectures=["OPTForCausalLM"], model_type="opt", vocab_size=2000,
        hidden_size=384, ffn_dim=1536, num_hidden_layers=8, num_attention_heads=6,
        word_embed_proj_dim=384, do_layer_norm_before=True,
    ),
    "llama": dict(
        _LLAMA, architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=1000,
        hidden_size=384, intermediate_size=1152, num_hidden_layers=8, tie_word_embeddings=False,
    ),
    "qwen3-moe": dict(
        _LLAMA, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=500,
        hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_experts=16,
        num_experts_per_tok=2, norm_topk_prob=True, num_hidden_layers=6, head_dim=32,
        tie_word_embeddings=False,
    ),
    "gemma2": dict(
        _LLAMA, architectures=["Gemma2ForCausalLM"], model_type="gemma2", vocab_size=2000,
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, head_dim=32,
        sliding_window=24, query_pre_attn_scalar=32, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh",
    ),
    "qwen3.5": dict(
        _SHARED, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", vocab_size=1000,
        hidden_size=384, intermediate_size=1152, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=48, linear_num_value_heads=8, linear_num_key_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2, tie_word_embeddings=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An engine under limits, and what it is asked."""

    model: str
    options: dict[str, Any]
    requests: list[GenerationRequest]


def drawn(seed: int, folder: Path) -> Case:
    """Draw a case; limits are shares of the weights' bytes."""
    draw = random.Random(seed)
    name, precision = draw.choice(list(MODELS)), draw.choice(["fp16", "fp16", "4bit", "fp16-s"])
    config, _ = read_model_config(resolve(folder / name))
    total = sum(StorageSizes(config, precision_named(precision)).matrices.values())
    device, schedule = draw.choice(["cpu", "sim", "sim"]), draw.choice(["auto", "zigzag", "row"])
    cpu = int(total * draw.choice([0.1, 0.2, 0.33, 0.5, 0.7, 1.0, 2.0]) * draw.uniform(0.8, 1.2))
    gpu = (
        int(total * draw.choice([0.15, 0.3, 0.6, 1.5]) * draw.uniform(0.8, 1.2))
        if device == "sim"
        else None
    )
    most = draw.choice([4, 12, 60])
    asked = workload(seed, draw.choice([5, 24]), draw.choice([20, 60, 200]))
    requests = [replace(request, max_tokens=min(most, 5 * request.max_tokens)) for request in asked]
    if draw.random() < 0.2:
        schedule = "prefill-only"
        requests = [
            replace(request, max_tokens=min(1, request.max_tokens), n=1) for request in requests
        ]
    options = {
        "weights": "dummy",
        "precision": precision,
        "device": device,
        "limits": MemoryLimits(gpu, cpu, 2 << 30),
        "offload_dir": folder / "offload",
        "overlap": draw.random() < 0.8,
        **({} if schedule == "auto" else {"schedule": schedule}),
    }
    return Case(name, options, requests)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, monkeypatch_module):
    """A folder with the configurations of the models; plans are for a laptop, so nothing is
    measured.
    """
    root = tmp_path_factory.mktemp("limits")
    monkeypatch_module.setenv("FLEXGEN_HELM_HARDWARE", "laptop")
    for name, config in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def check(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a case; return 'refused' where the plan did so, else 'answered'."""
    passes, compute = 0, Executor.run

    def counted(*arguments: Any) -> None:
        nonlocal passes
        passes += 1
        compute(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "run", counted)
        try:
            with Engine.from_pretrained(folder / case.model, **case.options) as engine:
                results, record = engine.run(case.requests), engine.last_run
        except MemoryLimitError as error:
            assert not passes and re.search(r" bytes\) (more |or more there)", str(error)), error
            return "refused"
    assert all(record["peak_bytes"][tier] <= limit for tier, limit in record["limit_bytes"].items())
    refused = [
        request
        for request, result in zip(case.requests, results, strict=True)
        if result.error is not None
    ]
    if refused:  # then no cache could have been on the disk beside these weights
        weights = record["achieved_placement"]["weights"]
        on_disk = {
            **case.options,
            "policy": Policy(1, 1, weights["gpu"], min(weights["cpu"], 1 - weights["gpu"]), 0, 0),
        }
        with (
            pytest.raises(MemoryLimitError, match=" bytes\\) more "),
            Engine.from_pretrained(folder / case.model, **on_disk) as engine,
        ):
            engine.run(refused)
        return "refused"
    # a quantized cache may fall on either side of a rounding
    if case.options["precision"] == "fp16":
        with Engine.from_pretrained(folder / case.model, weights="dummy", device="cpu") as engine:
            assert_same(results, engine.run(case.requests))
    return "answered"


# The last: states of a prompt and of its completions; a search that left too little beside whole
# matrices; waiting tokens of a mixture that left no room for a cache in use.
SEEDS = (*range(1000, 1012), 5100, 5147, 40063)
# Only where no token of a mixture waits for another's experts is there room.
ROOM_BATCH_BY_BATCH = 50061


@pytest.mark.fast(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_refuses_or_every_request_is_answered(folder, monkeypatch, seed):
    check(drawn(seed, folder), folder, monkeypatch)


def test_at_last_a_run_goes_batch_by_batch(folder, monkeypatch):
    assert check(drawn(ROOM_BATCH_BY_BATCH, folder), folder, monkeypatch) == "answered"


def test_without_making_room_what_was_fetched_ahead_is_in_the_way(folder, monkeypatch):
    """The guard's inverse: layers that wait for their turn keep what is needed now from its
    memory.
    """
    ledger = Ledger("gpu", 100)
    ahead = [ledger.claim("staging", 60, ahead=True)]
    with pytest.raises(MemoryLimitError):
        ledger.claim("cache", 50)
    ledger.make_room = lambda: ledger.release(ahead.pop())
    with pytest.raises(MemoryLimitError):
        ledger.claim("staging", 50, ahead=True)
    assert ledger.claim("cache", 50) and ledger.in_use == 50
