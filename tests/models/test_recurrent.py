"""Layers that keep a state of each sequence (Qwen3.5, Falcon-H1): nothing is lost, and nothing
taken in twice.
"""

from dataclasses import replace

import pytest
import torch
import transformers

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.errors import MemoryLimitError, UnsupportedArchitectureError
from flexgen_helm.kv_cache.block_states import BlockStates
from flexgen_helm.kv_cache.cache import KVCache
from flexgen_helm.models.transformers_backend import trace
from flexgen_helm.models.transformers_backend.read_config import read_transformers_config
from tests.helpers.backend_models import largest_difference, off, saved
from tests.helpers.layers import replace_layers
from tests.helpers.offload import MIB
from tests.helpers.parity import TOLERANCE
from tests.helpers.tiny_causal_models import tiny_config
from tests.helpers.tiny_models import VOCABULARY, save_tokenizer

HYBRID = "Qwen3_5ForCausalLM"  # a layer of linear attention, and one of attention


def requests(count=6, **changes):
    shared = [7, 9, 11, 7, 5, 3, 8]
    prompts = [[*shared[: 7 * (i % 2)], *range(3 + i, 6 + 4 * i)] for i in range(count)]
    options = {"max_tokens": 5, "echo_logprobs": True, "ignore_eos": True, **changes}
    return [GenerationRequest(prompt_token_ids=prompt, **options) for prompt in prompts]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    return saved(HYBRID, folder), folder


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "row"}, {"schedule": "zigzag", "policy": Policy(2, 2, 0, 0.5, 0, 0)}],
)
def test_several_completions_go_on_from_one_prompt(hybrid, options, tmp_path):
    model, folder = hybrid
    asked = [replace(request, n=3, temperature=1.0, seed=4) for request in requests()]
    with Engine.from_pretrained(folder, offload_dir=tmp_path, **options) as engine:
        results = engine.run(asked)
    assert len({completion.token_ids for completion in results[0].completions}) > 1
    assert max(off(model, result) for result in results) < TOLERANCE


def test_prompts_alone_layer_by_layer(hybrid):
    model, folder = hybrid
    asked = requests(max_tokens=0)
    with Engine.from_pretrained(folder, schedule="prefill-only") as engine:
        results = engine.run(asked)
    assert max(off(model, result) for result in results) < TOLERANCE


@pytest.mark.parametrize("two_versions", [True, False])
def test_a_pass_that_breaks_off_takes_no_token_in_twice(hybrid, monkeypatch, two_versions):
    """Memory runs out behind the first layers of a pass that decodes; the inverse: with one version
    it would show.
    """
    model, folder = hybrid
    failures = []

    def fails_once(compute, layer, batches):
        out, metadata = compute(), batches[0].attend.backend.metadata
        if layer == 1 and not metadata.prompts and len(failures) < 1 and len(metadata.decodes) > 1:
            failures.append(layer)
            raise torch.OutOfMemoryError("out of memory")
        return out

    if not two_versions:

        def one_version(self, layer, states):
            self._versions(layer)[:, : len(states)] = states

        monkeypatch.setattr(BlockStates, "write", one_version)
    replace_layers(monkeypatch, fails_once)
    monkeypatch.setattr("flexgen_helm.planner.run_memory.LARGE_BLOCK_SEQUENCES", 2)
    asked = requests()
    with Engine.from_pretrained(folder) as engine:
        results = engine.run(asked)
    assert failures
    assert (max(off(model, result) for result in results) < TOLERANCE) == two_versions


@pytest.mark.one_release
@pytest.mark.slow
def test_answers_that_grow_by_pages_and_are_preempted(monkeypatch, tmp_path):
    """States move with their sequences, and are computed again with them."""
    model = saved(HYBRID, tmp_path, max_position_embeddings=512, vocab_size=VOCABULARY)
    save_tokenizer(tmp_path)
    asked = requests(8, max_tokens=180, ignore_eos=False, echo_logprobs=False, stop=("x",))
    honest, calls = KVCache.regroup, []

    def failing(self, block, sources):
        calls.append(len(sources))
        # no room for the larger block: its sequences give their caches back
        if len(calls) in (2, 5):
            for source in dict.fromkeys(source for source, _ in sources):
                self.free(source)
            raise MemoryLimitError("no room")
        honest(self, block, sources)

    monkeypatch.setattr(KVCache, "regroup", failing)
    monkeypatch.setattr("flexgen_helm.planner.run_memory.LARGE_BLOCK_SEQUENCES", 3)
    with Engine.from_pretrained(tmp_path) as engine:
        results, record = engine.run(asked), engine.last_run
    assert len(calls) > 5 and record["preemptions"] > 0
    assert max(off(model, result) for result in results) < TOLERANCE


@pytest.mark.parametrize("one_by_one", [True, False])
def test_a_scan_that_drops_the_state_before_goes_on_token_by_token(
    monkeypatch, one_by_one, tmp_path
):
    """Jamba's scan begins with zeros whenever it is given several tokens; the inverse: it shows."""
    if not one_by_one:
        monkeypatch.setattr(trace, "_ignores_a_state", lambda *given: False)
    difference, config = largest_difference("JambaForCausalLM", tmp_path, {})
    assert [kind.mixer.one_by_one for kind in config.modules.kinds if kind.mixer is not None] == [
        one_by_one
    ]
    assert (difference < TOLERANCE) == one_by_one


def test_a_state_that_nobody_goes_on_from_is_refused(monkeypatch):
    monkeypatch.setattr(trace, "_ignores_a_state", lambda *given: True)
    config = tiny_config(HYBRID).to_dict() | {"architectures": [HYBRID]}
    with pytest.raises(UnsupportedArchitectureError, match="does not go on from the states"):
        read_transformers_config(config)


@pytest.mark.one_release
def test_states_are_counted(tmp_path):
    """Within limits that hold a few states, a run ends with the same answers, and its peak is below
    them.
    """
    torch.manual_seed(0)
    config = tiny_config(HYBRID)
    config.num_hidden_layers, config.layer_types = 4, ["linear_attention", "full_attention"] * 2
    config.hidden_size, config.intermediate_size = 256, 1024
    model = transformers.Qwen3_5ForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.half().save_pretrained(tmp_path / "model")
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    asked = requests(12)
    with Engine.from_pretrained(tmp_path / "model") as engine:
        needed = engine.run(asked) and engine.last_run["peak_bytes"]["cpu"]
        assert (
            engine.model_config.attention_flops(3, 5) == 4 * 2 * engine.model_config.q_size * 3 * 5
        ), "of the two that attend"
    limits = MemoryLimits(cpu=int(0.3 * needed), disk=256 * MIB)
    with Engine.from_pretrained(
        tmp_path / "model", limits=limits, offload_dir=tmp_path / "tiers"
    ) as engine:
        results, record = engine.run(asked), engine.last_run
    assert record["peak_bytes"]["cpu"] <= limits.cpu
    assert max(off(model, result) for result in results) < TOLERANCE
