"""Every causal class of transformers that runs by its own modules gives the numbers of its own
forward pass.
"""

import copy
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import transformers

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError
from flexgen_helm.models.architectures import architecture_of_config
from flexgen_helm.models.config import HEAD_MATRIX, tensor_shapes
from flexgen_helm.models.transformers_backend import empty_model
from flexgen_helm.models.transformers_backend.classes import MULTI_PART_CLASSES
from flexgen_helm.models.transformers_backend.config import TransformersConfig
from flexgen_helm.models.transformers_backend.interfaces import Bindings, Mask
from flexgen_helm.models.transformers_backend.own_attention import OwnAttention
from tests.helpers.backend_models import (
    NATIVE,
    REFUSED,
    UNDECLARED,
    largest_difference,
    off,
    refused_classes,
    requests,
    saved,
    supported,
    tiny_model_config,
    without_interface,
)
from tests.helpers.backend_models import OTHERS as OTHER_CLASSES
from tests.helpers.offload import MIB
from tests.helpers.parity import TOLERANCE
from tests.helpers.shares import IS_WHOLE, share, share_of_release
from tests.helpers.tiny_causal_models import UNBUILT, causal_classes, tiny_config
from tests.helpers.tiny_models import kv_bytes_per_token

FAST = (
    "CohereForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "GraniteMoeForCausalLM",
    "NemotronForCausalLM", "Qwen3_5ForCausalLM", "RobertaForCausalLM", "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
)  # fmt: skip
MISTRAL = "Mistral3ForConditionalGeneration"
OFFLOADED = {
    "device": "sim",
    "limits": MemoryLimits(gpu=128 * MIB, cpu=128 * MIB, disk=256 * MIB),
    "policy": Policy(3, 2, 0.2, 0.4, 0.3, 0.4, 0.3, 0.4),
}


def with_each_release_if_whole(test):
    return pytest.mark.releases(test) if IS_WHOLE else test


def write_config(folder, name, config, **changes):
    content = {**config.to_dict(), "architectures": [name], **changes}
    (folder / "config.json").write_text(json.dumps(content, default=str))


def scored(texts, new=0):
    return [
        GenerationRequest(prompt_token_ids=ids, max_tokens=new, echo_logprobs=True, ignore_eos=True)
        for ids in texts
    ]


def run(folder, asked, **options):
    with Engine.from_pretrained(folder, **options) as engine:
        return engine.run(asked)


def check(name, folder):
    """In memory and on three tiers; in 4 bits the same numbers whatever is beside."""
    model = saved(name, folder)
    for options in ({}, {**OFFLOADED, "offload_dir": folder / "tiers"}):
        difference, config = largest_difference(name, folder, options, model)
        assert isinstance(config, TransformersConfig) and difference < TOLERANCE
    asked = requests()
    with Engine.from_pretrained(folder, precision="4bit") as engine:
        together = engine.run(asked)
        alone = [engine.run([request])[0] for request in asked]
    for one, same in zip(together, alone, strict=True):
        assert one.completions[0].token_ids == same.completions[0].token_ids
        pairs = zip(one.prompt_logprobs[1:], same.prompt_logprobs[1:], strict=True)
        assert all(abs(x - y) < TOLERANCE for x, y in pairs)


@pytest.mark.releases
@pytest.mark.slow
def test_classes_are_those_that_declare_the_interface():
    """Tests read the modules' text; classes say it by an attribute, which they may inherit."""
    flag, names = "_supports_attention_backend", set(causal_classes())
    declaring = {name for name in names if getattr(getattr(transformers, name), flag, False)}
    assert set(supported()) == (declaring | names & UNDECLARED) - NATIVE - OTHER_CLASSES


# Layers of different kinds, which cannot be repeated alike; published ones are among `PUBLISHED`.
IRREGULAR = {
    "Dots3NoteForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "NemotronHForCausalLM",
}


@pytest.mark.one_release
@pytest.mark.fast(2)
@pytest.mark.parametrize("part", range(8))
def test_every_class_is_read_with_as_many_layers_as_real_models_have(part):
    """What a model takes of a layer's results may be wrong from the fourth on."""
    names = [name for name in supported() if name not in IRREGULAR | REFUSED.keys()]
    for name in names[part::8]:
        content = json.loads(
            json.dumps(tiny_model_config(name).to_dict() | {"architectures": [name]}, default=str)
        )
        counts = {
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
        } & content.keys()
        layers = max(content[count] or 0 for count in counts)
        for entry, value in content.items():
            if entry in counts:
                content[entry] = 4 * layers
            elif (
                isinstance(value, list)
                and len(value) == layers
                and re.search("layer|pattern|types|intermediate", entry)
            ):
                content[entry] = 4 * value
        assert architecture_of_config(content).read_config(content).num_layers == 4 * layers, name


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "SmolLM3ForCausalLM"])
def test_padding_is_no_row_of_a_batch(name, tmp_path):
    """The tables of a batch have fewer rows than the id of padding, which is in one prompt and not
    in another.
    """
    model, draw = saved(name, tmp_path), random.Random(2)
    prompts = [[63], [5, 5, 63, 5, 5], [draw.randrange(60) for _ in range(20)]]
    with Engine.from_pretrained(tmp_path) as engine:
        results = [
            *(engine.run([request])[0] for request in scored(prompts, 2)),
            *engine.run(scored(prompts, 2)),
        ]
    assert max(off(model, result) for result in results) < TOLERANCE


@pytest.mark.parametrize("name", ["RobertaForCausalLM", "XLMRobertaXLForCausalLM"])
def test_a_text_with_padding_that_moves_positions_is_refused(name, tmp_path):
    """Other prompts of the same run are right; the model itself says that the refused one would not
    be.
    """
    model = saved(name, tmp_path)
    texts = [5, 6, 1, 7, 8], [5, 6, 7, 8]
    refused, result = run(tmp_path, scored(texts))
    assert "token 1, which has no position" in str(refused.error) and off(model, result) < TOLERANCE
    with torch.no_grad():
        shifted, counted = (
            model(torch.tensor(texts[:1]), position_ids=ids).logits
            for ids in (None, torch.tensor([[2, 3, 4, 5, 6]]))
        )
    assert (shifted - counted).abs().max() > 100 * TOLERANCE


def test_an_answer_that_goes_on_behind_padding_is_refused(tmp_path):
    """The model answers with it; an answer that ends there is right."""
    model = saved("RobertaForCausalLM", tmp_path)
    with torch.no_grad():
        model.lm_head.bias[1] = 100.0
    copy.deepcopy(model).half().save_pretrained(tmp_path)
    ended, refused = run(tmp_path, [*scored([[5, 6, 7]], 1), *scored([[5, 6, 7]], 2)])
    assert ended.completions[0].token_ids == (1,) and off(model, ended) < TOLERANCE
    assert "token 1, which has no position" in str(refused.error)


@pytest.mark.fast(3)
@with_each_release_if_whole
@pytest.mark.parametrize("name", FAST)
def test_it_equals_its_own_forward_pass(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.one_release
@pytest.mark.parametrize("name", ["CohereForCausalLM", "Qwen3_5ForCausalLM", "RobertaForCausalLM"])
def test_the_window_is_served_to_its_last_token(name, tmp_path):
    """A prompt as long as the window is served, one that is a token longer is refused alone."""
    model, draw = saved(name, tmp_path), random.Random(1)
    with Engine.from_pretrained(tmp_path) as engine:
        window = engine.model_config.max_positions
        longer = [draw.randrange(3, 60) for _ in range(window + 1)]
        asked = [*scored([longer[:window]], 1), *scored([longer]), *scored([longer[:4]], 2)]
        # no token comes after the last
        *results, refused = engine.run([*asked, *scored([longer], 1)])
    assert f"window of {window} tokens" in str(refused.error)
    assert max(off(model, result) for result in results) < TOLERANCE


@pytest.mark.fast(2)
@pytest.mark.one_release
@pytest.mark.parametrize(
    ("schedule", "on_gpu", "on_cpu"),
    [("zigzag", 0, 1), ("zigzag", 0, 0), ("row", 0.3, 0.4), ("prefill-only", 0.3, 0.4)],
)
def test_layers_that_use_keys_again_store_none(schedule, on_gpu, on_cpu, tmp_path):
    """Values are those of the model, wherever the cache is; its bytes are those of four layers of
    six.
    """
    most = 1 if schedule == "prefill-only" else 4
    asked = [replace(request, max_tokens=min(request.max_tokens, most)) for request in requests()]
    model = saved("Gemma4ForCausalLM", tmp_path)
    policy = Policy(3, 2, 0.2, 0.4, on_gpu, on_cpu, 0.3, 0.4)
    options = {
        **OFFLOADED,
        "offload_dir": tmp_path / "tiers",
        "schedule": schedule,
        "policy": policy,
    }
    with Engine.from_pretrained(tmp_path, **options) as engine:
        results, config = engine.run(asked), engine.model_config
    assert (config.num_cache_layers, config.cache_layers) == (4, (0, 1, 2, 3, 2, 3))
    assert kv_bytes_per_token(config, 2) == 4 * 2 * 2 * config.num_kv_heads * config.head_dim
    assert max(off(model, result) for result in results) < TOLERANCE


def test_latents_are_cached_instead_of_keys_of_every_head(tmp_path):
    """One head of 16 + 8 elements stands for four of 16, in every layer; a token scored alone has
    the same value.
    """
    saved("DeepseekV3ForCausalLM", tmp_path)
    with Engine.from_pretrained(tmp_path) as engine:
        config = engine.model_config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 1, 24)
    assert kv_bytes_per_token(config, 2) == 2 * 2 * 24 * 2
    expands = ("self_attn.kv_b_proj.weight", (4 * (8 + 8), 16))
    assert all(
        expands in kind.resident and expands not in kind.matrices for kind in config.modules.kinds
    )


def test_biases_that_choose_experts_keep_float32(tmp_path):
    """In 16 bits all of these would be 2000, and other experts would be chosen."""
    model = saved("DeepseekV3ForCausalLM", tmp_path / "of_16_bits")
    (bias,) = (
        buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    )
    with torch.no_grad():
        bias.copy_(2000 + torch.tensor([0.4, -0.4, 0.0, 0.3]))
    model.save_pretrained(tmp_path / "exact")
    (asked, *_) = requests()[2:]
    with Engine.from_pretrained(tmp_path / "exact") as engine:
        result = engine.run([asked])[0]
        kept = engine.model_config.modules.kind(1).float32
    assert "mlp.gate.e_score_correction_bias" in kept  # from 5.24 on, the router's weights too
    assert off(model, result) < TOLERANCE
    bias.copy_(bias.half().float())
    assert off(model, result) > 100 * TOLERANCE


OTHERS = [name for name in supported() if name not in FAST and name not in REFUSED]
IN_MEMORY_TOO = share(OTHERS, 4)


@pytest.mark.releases
@pytest.mark.slow
@pytest.mark.parametrize("name", share_of_release(OTHERS, 4))
def test_every_class_equals_its_own_forward_pass(name, tmp_path):
    """On three tiers, where most may go wrong; a fixed part in every way."""
    if name in IN_MEMORY_TOO:
        check(name, tmp_path)
    else:
        difference, config = largest_difference(
            name, tmp_path, {**OFFLOADED, "offload_dir": tmp_path / "tiers"}
        )
        assert isinstance(config, TransformersConfig) and difference < TOLERANCE


SEVERAL_PARTS = share_of_release(sorted(MULTI_PART_CLASSES & set(dir(transformers))), 4)
SLOW = pytest.mark.releases, pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [MISTRAL, *(pytest.param(name, marks=SLOW) for name in SEVERAL_PARTS if name != MISTRAL)],
)
def test_every_language_model_among_several_parts(name, tmp_path):
    if name == "Llama4ForConditionalGeneration" and transformers.__version__.startswith("5.24."):
        pytest.skip("of text alone, the class itself fails there: its output has no image_outputs")
    assert largest_difference(name, tmp_path, {})[0] < TOLERANCE


def test_a_placeholder_of_an_image_that_the_model_replaces_is_refused(tmp_path):
    """Without an image, too: Gemma 4 gives it the embedding of padding."""
    saved("Gemma4ForConditionalGeneration", tmp_path, image_token_id=40)
    refused, result = run(tmp_path, scored([[5, 40, 6], [5, 6]]))
    assert "token 40, which stands for an image" in str(refused.error) and result.error is None


def test_a_language_model_that_transformers_does_not_list(tmp_path):
    """Mistral Small 4: Mistral 3's vision around a text model whose class is in no list of causal
    ones.
    """
    outer, text = tiny_config(MISTRAL), tiny_config("Mistral4ForCausalLM")
    write_config(tmp_path, MISTRAL, outer, text_config=text.to_dict())
    with Engine.from_pretrained(tmp_path, weights="dummy") as engine:
        assert engine.model_config.modules.class_name == "Mistral4ForCausalLM"
        assert engine.model_config.modules.layers_path == "model.layers"


def test_a_model_of_several_parts_with_logits_of_its_own_is_refused(tmp_path):
    """The guard's inverse: its language model alone gives other numbers."""
    name = "AyaVisionForConditionalGeneration"
    model = saved(name, tmp_path)
    with pytest.raises(UnsupportedArchitectureError, match=name):
        Engine.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 9, 7]])
    inner = model.model.language_model(input_ids=ids).last_hidden_state
    scaled = model.lm_head(inner) * model.config.text_config.logit_scale
    assert (
        torch.log_softmax(model(input_ids=ids).logits, -1) - torch.log_softmax(scaled, -1)
    ).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REFUSED if hasattr(transformers, name)])
def test_what_is_listed_is_refused_by_name(name, tmp_path):
    """The list's inverse: a class that runs does not belong to it."""
    model = getattr(transformers, name)._from_config(tiny_config(name).get_text_config())
    model.half().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitectureError, match=REFUSED[name]) as refused:
        Engine.from_pretrained(tmp_path)
    assert name in str(refused.value)


@pytest.mark.skipif(
    transformers.__version__.startswith("5.20."),
    reason=("its rotation reads positions while shapes alone pass: refused"),
)
def test_a_rotation_that_depends_on_the_longest_text_is_served_up_to_the_original_context(tmp_path):
    """Beyond it, the short texts of a batch would get the rotation of the long one."""
    factors = {
        "short_factor": [1.0] * 4,
        "long_factor": [9.0] * 4,
        "original_max_position_embeddings": 24,
    }
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    model = saved("SmolLM3ForCausalLM", tmp_path, rope_parameters=rope)
    *results, longer = run(tmp_path, scored([range(5, 29), range(5, 8), range(5, 31)]))
    assert max(off(model, result) for result in results) < 1e-3 and "window of 24" in str(
        longer.error
    )
    positions = torch.arange(25)[None]
    together = model.model.rotary_emb(torch.zeros(1, 1, 8), positions)[0][:, :3]
    alone = model.model.rotary_emb(torch.zeros(1, 1, 8), positions[:, :3])[0]
    assert (together - alone).abs().max() > 0.1  # the guard's inverse


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("DeepseekV32ForCausalLM", {}),
        ("GlmMoeDsaForCausalLM", {}),
        ("GlmMoeDsaForCausalLM", {"indexer_types": ["full", "shared"]}),  # as GLM-5.2
    ],
)
def test_sparse_attention_is_served_as_far_as_it_takes_all_keys(name, changes, tmp_path):
    """Beyond `index_topk` keys transformers leaves some out, so longer prompts are refused."""
    model = saved(name, tmp_path, index_topk=24, **changes)
    # the last token is not fed
    whole, longer, short = run(tmp_path, scored(range(5, end) for end in (30, 31, 12)))
    assert max(off(model, result) for result in (whole, short)) < TOLERANCE
    assert "26 tokens" in str(
        longer.error
    ) and "24 tokens, where its sparse attention begins;" in str(longer.error)
    ids = torch.tensor([[*range(5, 45)]])
    model.config.index_topk = 1000
    dense = copy.deepcopy(model)
    for layer in dense.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = 1000
    difference = (model(input_ids=ids).logits - dense(input_ids=ids).logits).abs().amax(-1)[0]
    assert difference[:24].max() < 1e-5 < 0.01 < difference[24:].max()  # the guard's inverse


def test_weights_of_an_indexer_are_read_by_a_class_that_has_one_alone(tmp_path):
    """DeepSeek V3.2 by another name would attend to all keys, however many there are."""
    saved("DeepseekV32ForCausalLM", tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="indexer"):
        Engine.from_pretrained(tmp_path, unverified=True)


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v, mask: (q @ k + mask) @ v,  # no softmax
        lambda q, k, v, mask: (
            2 * ((q @ k + mask).softmax(-1) @ v) + ((q @ k + mask).softmax(-1) * 2) @ v
        ),
        lambda q, k, v, mask: (q @ k + mask).softmax(-2) @ v,
        lambda q, k, v, mask: (q @ k * torch.ones(2, 1, 1) + mask).softmax(-1) @ v,
        lambda q, k, v, mask: (q @ k + mask + torch.zeros(3)).softmax(-1) @ v,
        lambda q, k, v, mask: (q @ k + mask).tanh().softmax(-1) @ v,
        lambda q, k, v, mask: (
            (torch.baddbmm(torch.ones(2, 3, 3), q[0], k[0]) + mask).softmax(-1) @ v[0]
        ),
    ],
)
def test_attention_in_its_own_code_that_does_more_is_refused(attend):
    q, v = torch.randn(2, 1, 2, 3, 4)
    with OwnAttention(Bindings(lambda call: call.q)), pytest.raises(UnsupportedArchitectureError):
        attend(q, q.transpose(-1, -2), v, Mask())


@pytest.mark.fast(1)
@pytest.mark.parametrize("name", without_interface())
def test_a_class_without_the_interface_is_refused(name, tmp_path):
    """Whatever it does instead, none of them runs with other numbers."""
    write_config(tmp_path, name, tiny_config(name).get_text_config())
    with pytest.raises(
        (UnsupportedArchitectureError, CheckpointError), match=name.removesuffix("ModelWithLMHead")
    ):
        Engine.from_pretrained(tmp_path, weights="dummy")


@pytest.mark.parametrize("name", ["BioGptForCausalLM", "ModernBertDecoderForCausalLM"])
def test_a_tied_head_is_known_by_its_own_name(name):
    config = tiny_config(name)
    config.tie_word_embeddings = True
    read = architecture_of_config(
        content := config.to_dict() | {"architectures": [name]}
    ).read_config(content)
    assert read.tied_head and HEAD_MATRIX not in tensor_shapes(read)


@pytest.mark.one_release
def test_every_class_runs_or_is_refused_by_name():
    runs = (set(supported()) - set(REFUSED)) | (NATIVE | OTHER_CLASSES) & set(causal_classes())
    refused = refused_classes()
    assert not runs & refused and runs | refused == set(causal_classes()) | UNBUILT
    # 5.20 has fewer classes
    assert len(runs) >= (145 if transformers.__version__ < "5.23" else 149)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": "large"},
        {"num_local_experts": 10**9},
        {"num_attention_heads": 0},
    ],
)
def test_entries_that_no_model_has_are_refused_in_one_sentence(changes, tmp_path):
    write_config(tmp_path, "GptOssForCausalLM", tiny_config("GptOssForCausalLM"), **changes)
    with pytest.raises((CheckpointError, UnsupportedArchitectureError)) as refused:
        Engine.from_pretrained(tmp_path, weights="dummy")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    if (number := next(iter(changes.values()))) == 10**9:
        with pytest.raises(ValueError, match=f"is {number}; at most 4,096 can be read"):
            empty_model.class_and_config(json.dumps({**whole, "text_config": changes}))


@pytest.mark.one_release
def test_other_threads_make_modules_of_their_own_meanwhile():
    """Parameters of the model being read go to the meta device, those of other threads do not."""

    def device():
        return torch.nn.Linear(2, 2).weight.device.type

    with ThreadPoolExecutor() as pool, empty_model._meta_parameters():
        assert device() == "meta"
        assert pool.submit(device).result() == "cpu"
    assert device() == "cpu"
