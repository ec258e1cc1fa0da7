"""Every key of a GGUF file's tokenizer is read, known to change nothing, or refused: token ids against llama.cpp's."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError
from flexgen_helm.tokenizer.gguf_tokenizer import IRRELEVANT, NEUTRAL
from flexgen_helm.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "In 1998 and 2024 the price was 3.14 or 1234567 euros; it's 1998 again, and 99 9999 more.",
    "def f(x):\n    return x + 1\n\n\nprint(f(22))  # the café is THERE'S\r\n\r\n",
    "The quick brown fox jumps over the lazy dog,  and   the dog does not mind; aaaa banana papaya.",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>", "<tool>"]
CONTROL, USER, UNKNOWN = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNKNOWN
TYPES = [UNKNOWN, CONTROL, CONTROL, CONTROL, CONTROL, CONTROL, USER]
PARTS = [
    *SPECIAL, " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "the", " dog", "The", "ban", "ana", "aaa", "it's", "1998",
    "12", "½", "é", "日本", "👍", "\x00", "<0x41>", "<", ">", "\u00a0", "print(", "...", "'S", "_", "▁",
]  # fmt: skip
# Of llama.cpp (LLM_KV_TOKENIZER_…), with a value that would change something if anything did.
ID_KEYS = (
    "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask", "fim_pre", "fim_suf", "fim_mid",
    "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle",
)  # fmt: skip
KEYS: dict[str, Any] = {
    **{f"tokenizer.ggml.{name}_token_id": 9 for name in ID_KEYS},
    "tokenizer.ggml.token_type_count": 2,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.ggml.add_sep_token": True,
    "tokenizer.ggml.add_space_prefix": True,
    "tokenizer.ggml.remove_extra_whitespaces": True,
    "tokenizer.ggml.precompiled_charsmap": [1, 2, 3, 4],
    "tokenizer.ggml.normalizer.lowercase": True,
    "tokenizer.ggml.normalizer.strip_accents": True,
    "tokenizer.ggml.suppress_tokens": [9],
    "tokenizer.huggingface.json": "{}",
    "tokenizer.rwkv.world": "x",
    "tokenizer.chat_template": "{{ 1 }}",
    "tokenizer.chat_templates": ["tool_use"],
    "tokenizer.chat_template.tool_use": "{{ 2 }}",
}
UNREAD = ("tokenizer.ggml.added_tokens", "tokenizer.ggml.strange", "tokenizer.strange")
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def vocabulary(model: str) -> dict[str, Any]:
    """Keys of a tokenizer that learnt a corpus."""
    learnt = Backend(models.BPE())
    if model == "llama":
        learnt.pre_tokenizer = pre_tokenizers.Metaspace()
        learnt.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=220, show_progress=False))
    else:
        learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        lines = [piece for line in CORPUS for piece in (line, *line.split(" "))]
        trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
        learnt.train_from_iterator(lines, trainer)
    content = json.loads(learnt.to_str())["model"]
    pieces = sorted(content["vocab"], key=content["vocab"].__getitem__)
    types = [gguf.TokenType.NORMAL] * len(pieces)
    if model == "llama":
        order = {"".join(merge): rank for rank, merge in enumerate(content["merges"])}
        scores = [-float(order.get(piece, 1000 + i)) for i, piece in enumerate(pieces)]
        pieces = [*(f"<0x{i:02X}>" for i in range(256)), *pieces]
        types = [*[gguf.TokenType.BYTE] * 256, *types]
        rest: dict[str, Any] = {"tokenizer.ggml.scores": [0.0] * (256 + len(SPECIAL)) + scores}
    else:
        rest = {"tokenizer.ggml.merges": [" ".join(merge) for merge in content["merges"]]}
        rest["tokenizer.ggml.bos_token_id"], rest["tokenizer.ggml.eos_token_id"] = 1, 2
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [*SPECIAL, *pieces],
        "tokenizer.ggml.token_type": [*TYPES, *types],
        **rest,
    }


def write(path: Path, keys: dict[str, Any], name: str = "drawn") -> Path:
    """A model of one layer with these keys; None leaves one out."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
    for key, value in {**sizes, "attention.head_count": 2}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in keys.items():
        if value is not None:
            add: Any = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
            add[type(value)](key, value)
    tokens = len(keys["tokenizer.ggml.tokens"])
    shapes = {"token_embd": (tokens, 32), "output": (tokens, 32), "output_norm": (32,)}
    shapes |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (32, 32) for part in ("gate", "up", "down")}
    shapes |= {f"blk.0.{part}_norm": (32,) for part in ("attn", "ffn")}
    for tensor, shape in shapes.items():
        writer.add_tensor(f"{tensor}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theirs(path: Path, texts: list[str]) -> list[list[int]]:
    """Token ids by llama.cpp, with special tokens in front, and where the text names them."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp's wheel is not installed (pip install xllamacpp)")
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = str(path), 64, 1, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    found = []
    for text in texts:
        content = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", content)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=30) as answer:
            found.append(json.load(answer)["tokens"])
    return found


def drawn_texts(seed: int, count: int = 150) -> Iterator[str]:
    draw = random.Random(seed)
    yield from [*CORPUS[:3], " ", "  a", "\n", " the", "<|user|>\nhi<|end|>\n  <tool> x"]
    for _ in range(count):
        text = "".join(draw.choices(PARTS, k=draw.randint(1, 8)))
        if not text.startswith(("<s>", "<|endoftext|>")):  # a second BOS is left out here
            yield text


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    return tokenizer


LLAMA_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix": {"tokenizer.ggml.add_space_prefix": False},
    "BOS and EOS": {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
    "other ids": {
        "tokenizer.ggml.bos_token_id": 5,
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.add_eos_token": True,
    },
}
CASES = [("llama", name, keys) for name, keys in LLAMA_CASES.items()]
CASES += [("phi3", "plain", {}), ("phi3", "no BOS", {"tokenizer.ggml.add_bos_token": False})]
PRE = (
    "gpt-2", "phi-2", "olmo", "smollm", "starcoder", "refact", "llama-bpe", "llama3", "llama-v3", "qwen2",
    "deepseek-r1-qwen",
)  # fmt: skip
CASES += [("gpt2", pre, {"tokenizer.ggml.pre": pre}) for pre in PRE]
BOTH = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
CASES += [("gpt2", "BOS and EOS", {"tokenizer.ggml.pre": "gpt-2", **BOTH})]


@pytest.mark.parametrize(("model", "name", "keys"), CASES, ids=[f"{model}-{name}" for model, name, _ in CASES])
def test_token_ids_are_llama_cpps(tmp_path: Path, model: str, name: str, keys: dict[str, Any]) -> None:
    content = {**vocabulary("gpt2" if model == "gpt2" else "llama"), **keys}
    path = write(tmp_path / "m.gguf", content, "Phi-3 mini" if model == "phi3" else "drawn")
    texts = list(drawn_texts(len(name)))
    if model == "phi3":  # transformers strips it as any white space, llama.cpp does not know it as such
        texts = [text for text in texts if "\u00a0" not in text]
    tokenizer = load(path)
    wrong = {
        text: (found, reference)
        for text, reference in zip(texts, theirs(path, texts))
        if (found := tokenizer.encode(text)) != reference
    }
    assert not wrong


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("key", [*KEYS, *UNREAD])
def test_every_key_of_llama_cpp_is_read_or_irrelevant_or_refused(tmp_path: Path, model: str, key: str) -> None:
    content = {**vocabulary(model), **({"tokenizer.ggml.pre": "gpt-2"} if model == "gpt2" else {})}
    plain = load(write(tmp_path / "plain.gguf", content))
    path = write(tmp_path / "m.gguf", {**content, key: KEYS.get(key, "x")})
    if key in UNREAD or (key in NEUTRAL and not (model == "llama" and key.endswith("add_space_prefix"))):
        with pytest.raises(UnsupportedArchitectureError, match=f"has {key} = "):
            load(path)
        if key in NEUTRAL:
            neutral = {**content, key: NEUTRAL[key] if NEUTRAL[key] is False else None}
            assert load(write(tmp_path / "n.gguf", neutral)).encode(CORPUS[0])
        return
    texts = list(drawn_texts(1, 20))
    tokenizer = load(path)
    assert tokenizer.encode_batch(texts) == theirs(path, texts)
    if key in IRRELEVANT or key == "tokenizer.chat_template.tool_use":
        assert tokenizer.fingerprint == plain.fingerprint
    assert (9 in tokenizer.eos_ids) == any(key == f"tokenizer.ggml.{name}_token_id" for name in ENDS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.scores": [-1.0]}, "have|does not fit"),
        ({"tokenizer.ggml.scores": "equal"}, "the same score"),
        ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.tokens": "twice"}, "two tokens of the same text"),
    ],
)
def test_what_gives_no_order_of_merges_is_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    content = vocabulary("llama")
    ((key, value),) = change.items()
    if value == "equal":
        value = [-1000.0] * len(content["tokenizer.ggml.tokens"])  # gguf's LlamaHfVocab writes this
    if value == "twice":
        value = [*content[key][:-1], content[key][-2]]
    with pytest.raises(CheckpointError, match=named):
        load(write(tmp_path / "m.gguf", {**content, key: value}))


def test_a_byte_level_file_that_adds_a_token_must_name_it(tmp_path: Path) -> None:
    content = {**vocabulary("gpt2"), "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": None}
    with pytest.raises(CheckpointError, match="lacks 'tokenizer.ggml.bos_token_id'"):
        load(write(tmp_path / "m.gguf", content))
