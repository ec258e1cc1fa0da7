"""Small models of published configurations: every entry as published, but hidden sizes, heads,
layers and experts.

`tests/models/published.jsonl` has one configuration a line: `repo` on the hub, `source` of the
facts, `config`, what `config.json` says, and where they are known `generation`, what
`generation_config.json` says, and `tokens`, ids that `tokenizer_config.json` adds. `also` has
repositories that differ in sizes alone, and `refused` a part of the sentence that refuses the
model. Entries that change no value (dropout, initializers, authors' code) are left out. Sources are
of `config` alone: `generation` and `tokens` are from memory, but for gpt-oss and GLM-4.5.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from flexgen_helm import GenerationRequest
from flexgen_helm.models.architectures import architecture_of_config
from flexgen_helm.models.miniature import layer_kinds
from tests.helpers.paths import ROOT

FILE = ROOT / "tests" / "models" / "published.jsonl"
TOLERANCE = 1e-4
HIDDEN, HEADS, EXPERTS, ANSWER = 64, 4, 16, 6

_SIZES = {
    HIDDEN: "hidden_size d_model n_embd n_embed word_embed_proj_dim moe_intermediate_size "
    "expert_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size "
    "shared_expert_intermediate_size shared_intermediate_size",
    96: (
        "intermediate_size ffn_dim n_inner ffn_hidden_size intermediate_size_mlp "
        "dense_intermediate_size block_ff_dim"
    ),
    32: "q_lora_rank kv_lora_rank",
    8: "hidden_size_per_layer_input laurel_rank",
    EXPERTS: "num_experts num_local_experts n_routed_experts moe_num_experts",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
_HEADS = {"num_attention_heads", "n_head", "n_heads", "num_heads"}
_KV_HEADS = {"num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads"}
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
# Lists of numbers of layers.
_NUMBERS_OF_LAYERS = {"mlp_only_layers", "attn_layer_indices", "moe_layers", "full_attn_idxs"}
_STATES = {
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_num_heads",
    "mamba_n_heads",
    "mamba_d_ssm",
}
_OTHER_PARTS = {
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Published:
    """A row of the table."""

    repo: str
    source: str
    config: dict[str, Any]
    generation: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    refused: str = ""
    also: list[str] = field(default_factory=list)

    @property
    def end_ids(self):
        """The tokens that end an answer, of the model and of its language part."""
        parts = (self.generation, self.config, self.config.get("text_config") or {})
        return {token for part in parts for token in _as_list(part.get("eos_token_id"))}

    @property
    def special_ids(self):
        """All ids that the files name and the vocabulary has."""
        parts = (self.generation, self.config, self.config.get("text_config") or {})
        named = {
            token
            for part in parts
            for key, ids in part.items()
            if _is_id(key)
            for token in _as_list(ids)
        }
        known = {*named, *self.tokens} - {*self.refused_ids}
        return sorted(token for token in known if 0 <= token < self.vocab_size)

    @property
    def refused_ids(self):
        """Placeholders that transformers gives the embedding of another token."""
        names = ("image_token_id", "video_token_id", "audio_token_id")
        return [self.config[name] for name in names if self.config["model_type"] == "gemma4"]

    @property
    def vocab_size(self):
        config = _config_class(self.config)(**_without_class(self.config)).get_text_config()
        return int(config.vocab_size)


def rows():
    return [Published(**json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


def _is_id(key):
    return key.endswith(("_token_id", "_token_index", "_token_ids"))


def _as_list(ids):
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def _config_class(content):
    known: Any = transformers.CONFIG_MAPPING
    name = content["model_type"]
    return (
        known[name]
        if name in known
        else getattr(transformers, content["architectures"][0]).config_class
    )


def _without_class(content):
    left_out = ("architectures", "model_type", "quantization_config")
    return {name: value for name, value in content.items() if name not in left_out}


# ---- smaller ----


def read(content):
    return architecture_of_config(content).read_config(content)


def small_content(published):
    """The published `config.json` with small sizes, and a layer of each kind."""
    whole, kinds = read(published), None
    for layers in _layers_tried(published.get("text_config") or published, whole.num_layers):
        content = _shrunk(published, layers)
        kinds = kinds or layer_kinds(whole)
        try:
            found = layer_kinds(read(content))
        # lists that do not fit together, where entries count layers in another way
        except Exception:
            continue
        if found == kinds:
            return content
    raise AssertionError(f"no small configuration has all kinds of layers: {kinds}")


def _layers_tried(entries, count):
    lists = [
        value
        for name, value in entries.items()
        if isinstance(value, (list, str)) and len(value) == count and name not in _NUMBERS_OF_LAYERS
    ]
    shared = count - (entries.get("num_kv_shared_layers") or 0)
    signatures = [
        json.dumps([layer >= shared, *(value[layer] for value in lists)]) for layer in range(count)
    ]
    if len(first := sorted({signatures.index(signature) for signature in signatures})) > 1:
        yield first
        yield sorted({*first, *(layer + 1 for layer in first if layer + 1 < count)})
    yield from (
        list(range(number))
        for number in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, count)
        if number <= count
    )


def _shrunk(published, layers):
    """The published entries, smaller; beside them the sizes of the class's defaults that are not
    among them.
    """
    if published.get("text_config"):
        whole = _config_class(published)(**_without_class(published)).to_dict()
        parts = {
            name: part
            for name, part in whole.items()
            if isinstance(part, dict) and "model_type" in part
        }
        small = {
            **published,
            **{name: _part(published.get(name, {}), part) for name, part in parts.items()},
        }
        text = {**published["text_config"], "model_type": parts["text_config"]["model_type"]}
        return {**small, "text_config": _shrunk(text, layers)}
    full = _config_class(published)(**_without_class(published)).to_dict()
    return dict(published) | _small_sizes(dict(published), full, layers)


def changed(published, small):
    """The entries of a small configuration that are not as published, but for sizes and lists of
    layers.
    """
    if published.get("text_config"):
        published, small = published["text_config"], small["text_config"]
    sizes = {
        *_SIZE_OF,
        *_LAYERS,
        *_HEADS,
        *_KV_HEADS,
        *_STATES,
        "first_k_dense_replace",
        "num_kv_shared_layers",
    }
    if published["model_type"] == "mamba2":  # as many heads as groups at least
        sizes.add("head_dim")
    names = {name for name, value in published.items() if small[name] != value} - sizes
    return {
        name
        for name in names
        if not isinstance(small[name], list) and name != "hybrid_override_pattern"
    }


def _part(published, full):
    """Of a part that sees or hears: built, and not used."""
    small = {name: _SIZE_OF[name] for name in full.keys() & _SIZE_OF.keys() if full[name]}
    small |= {name: size for name, size in _OTHER_PARTS.items() if name in full}
    return {**published, **small, "model_type": full["model_type"]}


def _small_sizes(entries, full, layers):
    known = {name: value for name, value in {**full, **entries}.items() if value is not None}
    small: dict[str, Any] = {
        name: _SIZE_OF[name] for name in known.keys() & _SIZE_OF.keys() if known[name]
    }
    count = next(
        (known[name] for name in _LAYERS if name in known), len(known.get("layers_block_type", ()))
    )
    small |= dict.fromkeys(known.keys() & _LAYERS, len(layers))
    for name, value in entries.items():
        if name in _NUMBERS_OF_LAYERS and isinstance(value, list):
            small[name] = [new for new, layer in enumerate(layers) if layer in value]
        elif isinstance(value, list) and len(value) == count:
            small[name] = [_SIZE_OF.get(name, value[layer]) for layer in layers]
        elif name == "hybrid_override_pattern":
            small[name] = "".join(value[layer] for layer in layers)
    if shared := known.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = sum(layer >= count - shared for layer in layers)
    if known.get("first_k_dense_replace"):
        small["first_k_dense_replace"] = 1
    per_token = max((known.get(name, 0) for name in _PER_TOKEN), default=0)
    for name in small.keys() & set(_SIZES[EXPERTS].split()):
        small[name] = min(known[name], max(EXPERTS, per_token))
    _set_heads(known, small)
    _set_states(known, small)
    return small


def _set_heads(known, small):
    """Heads are as wide as published where the configuration says so, or lists a factor for each
    frequency.
    """
    hidden = next(known[name] for name in ("hidden_size", "d_model", "n_embd") if name in known)
    heads = next((known[name] for name in _HEADS if name in known), None)
    if heads is None or "ssm_cfg" in known:
        return
    few = HEADS
    rope = known.get("rope_scaling") or known.get("rope_parameters") or {}
    if known["model_type"] in ("codegen", "gptj", "helium") or (
        "short_factor" in rope and "head_dim" not in known
    ):
        few = 4 if known["model_type"] == "codegen" else 2  # whose fused rows are of four parts
        small |= dict.fromkeys(
            ("hidden_size", "d_model", "n_embd") & known.keys(), few * hidden // heads
        )
    small |= dict.fromkeys(known.keys() & _HEADS, few)
    for name in known.keys() & _KV_HEADS:
        small[name] = few if known[name] >= heads else 1 if known[name] == 1 else few // 2
    if "linear_num_key_heads" in known:
        small["linear_num_key_heads"] = 2
        small["linear_num_value_heads"] = (
            2 * known["linear_num_value_heads"] // known["linear_num_key_heads"]
        )


def _set_states(known, small):
    """Heads of Mamba are as wide together as what they are given, and no fewer than groups share
    states.
    """
    if known["model_type"] in ("mamba", "falcon_mamba"):
        small["intermediate_size"] = known["expand"] * HIDDEN
    groups = known.get("mamba_n_groups") or known.get("n_groups") or 1
    if "mamba_num_heads" in known:  # of any width
        small["mamba_num_heads"] = max(2, groups)
    for heads, width in (("mamba_n_heads", "mamba_d_head"), ("num_heads", "head_dim")):
        if width == "head_dim" and known["model_type"] != "mamba2" or heads not in known:
            continue
        inner = (known.get("mamba_expand") or known.get("expand")) * HIDDEN
        of_head = known[width] if isinstance(known[width], int) else 64
        small |= {heads: max(groups, inner // of_head), width: min(of_head, inner // groups)}
        if known.get("mamba_d_ssm"):
            small["mamba_d_ssm"] = small[heads] * small[width]


# ---- written ----


def write(row, folder):
    """Write a small random model as published; return it by transformers in float32, and its
    `config.json`.
    """
    content = small_content(row.config)
    model = random_model(content)
    text = content.get("text_config") or content
    dtype = getattr(torch, text.get("torch_dtype") or text.get("dtype") or "bfloat16")
    dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    _fill(model, row, dtype)
    values = {
        name: x.to(dtype) if x.is_floating_point() else x for name, x in model.state_dict().items()
    }
    values = {name: tensor.contiguous() for name, tensor in values.items()}
    model.save_pretrained(folder, state_dict=values)
    if quantization := content.get("quantization_config"):
        model = _stored_quantized(model, folder, dtype, quantization)
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if row.generation:
        (folder / "generation_config.json").write_text(json.dumps(row.generation))
    _write_tokenizer(row, folder)
    return model, content


def random_model(content):
    cls = getattr(transformers, content["architectures"][0], None)
    config = _config_class(content)(**_without_class(content))
    if cls is None:
        cls = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    return model


def _fill(model, row, dtype):
    """Random values that the type holds; scores of the tokens that end an answer vary more, so that
    answers end.
    """
    table = model.get_output_embeddings().weight
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point() and (
                isinstance(tensor, torch.nn.Parameter) or tensor.dim() == 1
            ):
                tensor.normal_(0.0, 0.15)
            if tensor is table:
                tensor[[token for token in row.end_ids if token < len(tensor)]] *= 6
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype).float())


def _write_tokenizer(row, folder):
    """A tokenizer that has the special tokens, whose texts are made up."""
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(
        models.WordLevel(
            {"a": 0} | {f"<|{token}|>": token for token in row.special_ids if token}, "a"
        )
    )
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


# ---- quantized as published ----


Stored = tuple[dict[str, torch.Tensor], torch.Tensor]  # ending -> tensor, and the values


def _store_fp8(name, values, quantization):
    """A scale for each block of 128 x 128, as DeepSeek V3's, or for the whole matrix, as Devstral
    2's.
    """
    parts = name.split(".")
    is_linear = (
        parts[-1] == "weight"
        and values.dim() == 2
        and parts[-2].endswith(("proj", "proj_with_mqa"))
    )
    if not is_linear and parts[-2] not in ("w1", "w2", "w3"):
        return None
    out, into = values.shape
    rows, columns = quantization.get("weight_block_size") or values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -into % columns, 0, -out % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    codes = (blocks / scales).to(torch.float8_e4m3fn)
    exact = (codes.float() * scales).reshape(padded.shape)[:out, :into].contiguous()
    whole = codes.view(torch.uint8).reshape(padded.shape)[:out, :into].contiguous()
    stored = {
        "weight": whole.view(torch.float8_e4m3fn),
        "weight_scale_inv": scales[:, 0, :, 0].contiguous(),
    }
    if quantization.get("weight_block_size") is None:
        stored |= {
            "weight_scale_inv": scales.view(()).clone(),
            "activation_scale": torch.tensor(1.5),
        }
        # The scale of a matrix has 16 bits, and so has the product.
        stored["weight_scale_inv"] = stored["weight_scale_inv"].bfloat16()
        exact = codes.float().reshape(padded.shape) * stored["weight_scale_inv"].float()
    return {
        f"{name.removesuffix('weight')}{ending}": tensor for ending, tensor in stored.items()
    }, exact


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _store_mxfp4(name, values, quantization):
    """Blocks of 32 inputs with an exponent, two values in a byte, as gpt-oss's experts: [experts,
    out, blocks, 16].
    """
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    blocks = values.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = torch.ceil(torch.log2(blocks.abs().amax(-1) / 6))
    scaled = blocks / 2.0 ** exponents[..., None]
    codes = (scaled[..., None] - _E2M1).abs().argmin(-1)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    exact = (_E2M1[codes] * 2.0 ** exponents[..., None]).flatten(2).transpose(1, 2).contiguous()
    return {f"{name}_blocks": packed, f"{name}_scales": (exponents + 127).to(torch.uint8)}, exact


_STORED = {"fp8": _store_fp8, "mxfp4": _store_mxfp4}


def _stored_quantized(model, folder, dtype, quantization):
    """Store the matrices of layers as the configuration says; return the model with their
    values.
    """
    plain = load_file(folder / "model.safetensors")
    stored, exact = {}, {}
    for name, values in plain.items():
        is_text = ".layers." in name and "vision" not in name
        found = (
            _STORED[quantization["quant_method"]](name, values, quantization) if is_text else None
        )
        stored |= {name: values} if found is None else found[0]
        exact[name] = values.to(dtype).float() if found is None else found[1]
    assert stored.keys() != plain.keys()
    save_file(exact, folder / "model.safetensors", {"format": "pt"})
    reference = type(model).from_pretrained(
        folder, config=model.config, dtype=torch.float32, attn_implementation="eager"
    )
    reference.set_experts_implementation("eager")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return reference.eval()


# ---- asked and compared ----


def requests(row):
    """Prompts with every special id, the end of the vocabulary, and ids all over it; two share a
    beginning.
    """
    vocab, draw = row.vocab_size, random.Random(0)
    special = [*row.special_ids, vocab - 1, vocab - 2]

    def drawn(count):
        return [draw.randrange(vocab) for _ in range(count)]

    beginning = [*special[:3], *drawn(20)]
    text = row.config.get("text_config") or row.config
    window = text.get("sliding_window") or 0
    prompts = [
        [special[0]], [*drawn(2), special[-2]], [token for one in special for token in (one, *drawn(1))],
        [*beginning, *drawn(3)], [*beginning, *special], drawn(window + 20 if window <= 128 else 50),
    ]  # fmt: skip
    return [
        GenerationRequest(prompt_token_ids=ids, max_tokens=ANSWER, echo_logprobs=True)
        for ids in prompts
    ]


def compare(model, row, request, result):
    """Return the largest difference from transformers, and whether the answer ended by itself.

    A greedy token counts with how far it is from the most probable one, and so does an end.
    """
    assert result.error is None, result.error
    prompt, answer = [*request.prompt_token_ids], result.completions[0]
    tokens, ends = [*answer.token_ids], sorted(row.end_ids)
    assert not {*tokens} & row.end_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0].float()
    logprobs = logits - logits.logsumexp(-1, keepdim=True)
    scores = [*result.prompt_logprobs[1:], *answer.logprobs[: len(tokens)]]
    ids = torch.tensor([*prompt[1:], *tokens])
    found = [
        abs(a - b)
        for a, b in zip(scores, logprobs[:-1].gather(1, ids[:, None])[:, 0].tolist(), strict=True)
    ]
    has_ended = answer.finish_reason == "endoftext"
    assert has_ended or len(tokens) == ANSWER
    for step in range(len(tokens) + has_ended):
        scores_of_step = _processed(row, [*prompt, *tokens[:step]], logits[len(prompt) - 1 + step])
        chosen = scores_of_step[tokens[step]] if step < len(tokens) else scores_of_step[ends].max()
        found.append((scores_of_step.max() - chosen).item())
    return max(0.0, *(math.inf if math.isnan(one) else one for one in found)), has_ended


def _processed(row, ids, scores):
    """Scores of the next token under the setting of `generation_config.json` that changes greedy
    answers.
    """
    penalty = row.generation.get("repetition_penalty", 1.0)
    if penalty == 1.0:
        return scores
    return transformers.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([ids]), scores[None]
    )[0]
