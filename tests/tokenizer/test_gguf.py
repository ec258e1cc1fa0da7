"""Tokenizers out of GGUF files: small ones written here, and SmolLM2's own where the file is present."""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from flexgen_helm.checkpoint.gguf_header import read_gguf_header
from flexgen_helm.concurrency import stopped_by
from flexgen_helm.errors import CheckpointError, Interrupted, UnsupportedArchitectureError
from flexgen_helm.progress import Event, describe, observed_by
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from flexgen_helm.tokenizer.tokenizer import _in_use as tokenizers_in_use

CORPUS = [
    "In 1998 and 2024 the price was 3.14 or 1234567 euros; it's 1998 again, and 99 9999 more.",
    "def f(x):\n    return x + 1\n\n\nprint(f(22))  # the café is THERE'S\r\n\r\n",
    "日本語の文章です。 ½ ² ٣٤ 👍👍 e\u0301",
]
SAMPLES = [*CORPUS, "", " 1", "  1", " ½", "x ²", "1234567", "\n \n", "it'S", "a<|end|>b", "<|end|>"]
K = gguf.Keys.Tokenizer
CONTROL, NORMAL, USER = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED


def write_gguf(path: Path, model: str, tokens: list[str], types: Sequence[int], **more: Any) -> Path:
    """Write a GGUF file without tensors; `more` are `GGUFWriter.add_<name>` calls."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def learnt() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE that was shown no word borders: only a split keeps digits apart."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    lines = [piece for line in CORPUS for piece in (line, *line.split(" "))] * 4
    backend.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(backend.to_str())["model"]
    tokens = ["<|endoftext|>", "<|end|>", *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    return tokens, [" ".join(merge) for merge in model["merges"]]


def reference_backend(pre: str, tokens: list[str], merges: list[str]) -> Backend:
    """The same vocabulary under the splitting that `transformers` or the model's own tokenizer.json prescribes."""
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    if pre == "qwen2":
        backend: Backend = Qwen2Tokenizer(vocab=vocab, merges=pairs).backend_tokenizer
    else:
        backend = Backend(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "llama-bpe")
        pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
        before: dict[str, list[Any]] = {
            "smollm": [pre_tokenizers.Digits(individual_digits=True)],
            "llama-bpe": [pre_tokenizers.Split(Regex(pattern), "isolated")],
        }
        backend.pre_tokenizer = pre_tokenizers.Sequence([*before.get(pre, []), byte_level])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens[:2]])
    return backend


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_splitting(tmp_path: Path, learnt: tuple[list[str], list[str]], pre: str) -> None:
    tokens, merges = learnt
    types = [CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 2)]
    ids = {"bos_token_id": 0, "eos_token_id": 1}
    path = write_gguf(tmp_path / "m.gguf", "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, **ids)
    tokenizer, reference = load(path), reference_backend(pre, tokens, merges)
    for text in SAMPLES:
        got = tokenizer.encode(text, add_special_tokens=False)
        assert got == reference.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(got) == (normalizers.NFC().normalize_str(text) if pre == "qwen2" else text)
    pieces = tokenizer.token_texts(tokenizer.encode("1998 99 9999", add_special_tokens=False))
    longest_number = max(len(piece.strip()) for piece in pieces)
    assert longest_number == {"gpt-2": 4, "smollm": 1, "llama-bpe": 3, "qwen2": 1}[pre]
    assert tokenizer.adds_bos == (pre == "llama-bpe")  # as llama.cpp does where the file does not say
    assert (tokenizer.eos_ids, tokenizer.eos_text) == ({0, 1}, "<|end|>")


def test_bos_eos_and_user_defined_tokens(tmp_path: Path, learnt: tuple[list[str], list[str]]) -> None:
    tokens, merges = learnt
    types = [CONTROL, USER, *[NORMAL] * (len(tokens) - 2)]
    more = {
        "tokenizer_pre": "gpt-2",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "add_bos_token": True,
        "add_eos_token": True,
    }
    path = write_gguf(tmp_path / "m.gguf", "gpt2", tokens, types, token_merges=merges, chat_template="{{ 1 }}", **more)
    tokenizer = load(path)
    assert tokenizer.encode("<|end|>") == tokenizer.encode("<|endoftext|><|end|>") == [0, 1, 0]
    assert tokenizer.decode([0, 1]) == "<|endoftext|><|end|>"
    assert tokenizer.apply_chat_template([]) == "1"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_from_scores(tmp_path: Path, prefix: bool) -> None:
    """A 'llama' vocabulary has scores and no merges; both describe the same segmentation."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = [f"<0x{i:02X}>" for i in range(256)] + sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *pieces]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    types = [gguf.TokenType.UNKNOWN, CONTROL, CONTROL, *[gguf.TokenType.BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "add_space_prefix": prefix}
    tokenizer = load(write_gguf(tmp_path / "m.gguf", "llama", tokens, types, token_scores=scores, **ids))
    with stopped_by(lambda: True), pytest.raises(Interrupted):
        load(write_gguf(tmp_path / "other.gguf", "llama", tokens, types, token_scores=scores, **ids))

    merges: Any = [tuple(merge) for merge in model["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    reference = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = [normalizers.Replace(" ", "▁")]
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *space] if prefix else space)
    reference.add_special_tokens(["<s>", "</s>"])
    reference.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    reference.decoder = decoders.Fuse()
    for text in [*SAMPLES, "price 🦊 </s>"]:
        got = tokenizer.encode(text)
        assert got == reference.encode(text).ids, text
        assert tokenizer.decode(got) == "<s>" + (" " if prefix and text else "") + text
    assert tokenizer.adds_bos


@pytest.mark.parametrize("name", ["Phi-3 mini", "another"])
def test_ends_of_turns_and_space_behind_phi3s_tokens(
    tmp_path: Path, learnt: tuple[list[str], list[str]], name: str
) -> None:
    """llama.cpp knows both by texts: ends by their own, the space by the model's name."""
    tokens, merges = learnt
    tokens, types = [*tokens, "<|user|>", "<|im_end|>"], [CONTROL, *[NORMAL] * (len(tokens) - 1), CONTROL, NORMAL]
    ids = {"eos_token_id": 5, "tokenizer_pre": "gpt-2", "name": name}
    tokenizer = load(write_gguf(tmp_path / "m.gguf", "gpt2", tokens, types, token_merges=merges, **ids))
    user = len(tokens) - 2
    assert tokenizer.eos_ids == {0, 1, 5, user + 1}  # <|endoftext|>, <|end|>, EOS, <|im_end|>
    space = [] if name == "Phi-3 mini" else tokenizer.encode("\n")
    assert tokenizer.encode("<|user|>\n<|im_end|>") == [user, *space, user + 1]
    assert tokenizer.encode("<|endoftext|>\n") == [0, *tokenizer.encode("\n")]


def test_a_tokenizer_is_built_once_while_it_is_in_use(tmp_path: Path) -> None:
    """HELM's threads and the engine of every precision ask for it; 262,144 pieces take four seconds."""
    built: list[Event] = []
    path = write_gguf(tmp_path / "m.gguf", "gpt2", ["a", "b"], [NORMAL, NORMAL], tokenizer_pre="gpt-2", token_merges=[])
    with observed_by(built.append):
        first = load(path)
        assert load(path) is first and [describe(event) for event in built] == ["building the tokenizer: m.gguf"]
        (tmp_path / "link.gguf").symlink_to(path)
        assert load(tmp_path / "link.gguf") is first
        write_gguf(path, "gpt2", ["a", "b", "c"], [NORMAL] * 3, tokenizer_pre="gpt-2", token_merges=[])
        assert load(path).vocab_size == 3 and first.vocab_size == 2
        del first
        gc.collect()
    assert not [known for known in tokenizers_in_use.values() if known.vocab_size == 2]


def test_unknown_kinds_are_named(tmp_path: Path, learnt: tuple[list[str], list[str]]) -> None:
    tokens, merges = learnt
    types = [NORMAL] * len(tokens)
    for pre in ("strange", "default", None):  # llama.cpp's 'default' is no model's rule
        named = {} if pre is None else {"tokenizer_pre": pre}
        path = write_gguf(tmp_path / "pre.gguf", "gpt2", tokens, types, token_merges=merges, **named)
        with pytest.raises(
            UnsupportedArchitectureError, match=rf"{pre!r}.*known are .*qwen2.*smollm.*gguf_new_metadata"
        ):
            Tokenizer.from_path(path)
    path = write_gguf(tmp_path / "model.gguf", "bert", tokens, types)
    with pytest.raises(UnsupportedArchitectureError, match=r"'bert'; known are gpt2, llama"):
        Tokenizer.from_path(path)
    writer = gguf.GGUFWriter(tmp_path / "none.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert Tokenizer.from_path(tmp_path / "none.gguf") is None


def test_damaged_files_are_named(tmp_path: Path, learnt: tuple[list[str], list[str]]) -> None:
    tokens, merges = learnt
    types = [NORMAL] * len(tokens)
    misfits: dict[str, dict[str, Any]] = {
        "types": {"types": types[:-1]},
        "merge": {"token_merges": ["a never-seen"]},
        "bos": {"bos_token_id": 10**6},
    }
    for name, more in misfits.items():
        fields: dict[str, Any] = {"types": types, "tokenizer_pre": "gpt-2", "token_merges": merges, **more}
        path = write_gguf(tmp_path / f"{name}.gguf", "gpt2", tokens, **fields)
        with pytest.raises(CheckpointError, match=name):
            Tokenizer.from_path(path)


def test_metadata_equals_gguf_reader(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a", 250)
    writer.add_int64("b", -(2**40))
    writer.add_float32("c", 0.5)
    writer.add_bool("d", True)
    writer.add_string("e", "naïve\n")
    writer.add_array("f", ["x", "", "é"])
    writer.add_array("g", [1, -2, 3])
    writer.add_array("h", [0.25, 1e6])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    want = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert read_gguf_header(tmp_path / "m.gguf").metadata == want


# ---- the real one ----


@pytest.fixture(scope="session")
def smollm2(wheel_model: Path) -> Tokenizer:
    return load(wheel_model)


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49_152
    assert (smollm2.bos_id, smollm2.bos_text, smollm2.adds_bos) == (1, "<|im_start|>", False)
    assert (smollm2.eos_ids, smollm2.eos_text) == ({0, 2}, "<|im_end|>")
    chat = smollm2.apply_chat_template([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}])
    assert chat == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


# '!' is 17 and printable ASCII follows in order, so '1' is 33; 'Ċ' (newline) is 198, 'Ġ' (space) 216, 'ĠĠ' 256, 'Â½'
# 16738. Digits are split off first: '  1' keeps its two spaces together, and ' ½' does not lend its space to ½'s first
# byte, as the plain GPT-2 split would ([216, 216, 33] and [3351, 138]).
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("12345", [33, 34, 35, 36, 37]),
        (" 1998", [216, 33, 41, 41, 40]),
        ("  1", [256, 33]),
        (" ½", [216, 16738]),
        ("\n", [198]),
        ("hello world", [28120, 905]),
        ("  two  spaces", [216, 827, 216, 5600]),
        ("👍", [10813, 235, 231]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
        (" hello <|endoftext|>", [33662, 216, 0]),
    ],
)
def test_smollm2_ids(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids) == text


# The vocabulary lacks 21 bytes (six control characters, lead bytes of unassigned planes); encoding drops them.
@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x2FFF, exclude_characters="\x7f"), max_size=60))
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode("utf-8")
