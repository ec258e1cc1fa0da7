"""Each model family's tokenizer: golden ids of some, one BOS or none, word borders, bytes of cut
characters.

The golden ids were worked out by a slow encoder of the published pipelines' steps, token by token;
all other texts are held against `tokenizers` on the same file (OPT, whose files are read by
`transformers`, against that).
"""

import json
import re
import unicodedata
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from flexgen_helm.errors import CheckpointError
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers_by_family import FAMILIES

NAMES = list(FAMILIES)
GOLDEN_TEXTS = [
    "Hello the 1998 cat's.\n",
    "  CAN'T café e\u0301\t\n\n",
    "世界 👍<|endoftext|></s> <bos>",
    " Hello",
]
# What tells the families apart, text by text:
# 1. 1998 whole runs (19 98), threes (199 8) or digits; '.' and newline in one piece or two; 's or '
# and s. 2. Two spaces: kept, or three with sentencepiece's own; e and accent composed (NFC) or
# left; newlines joined or not. 3. Characters of which a token holds some bytes; which of the
# special texts are tokens; bytes where no token fits. 4. A word that no order of merges reaches,
# though it is in the vocabulary (`ignore_merges`).
GOLDEN = {
    "llama3": [
        "308 291 258 220 276 23 265 266 282",
        "308 220 220 271 45 6 51 264 69 284 220 68 136 223 197 281",
        (
            "308 302 303 243 234 220 305 235 27 91 68 77 67 78 69 83 68 87 83 91 29 27 14 82 29 "
            "220 27 65 78 82 29"
        ),
        "308 296",
    ],
    "gemma2": [
        "2 353 323 264 339 340 330 331 347",
        "2 343 336 86 311 295 329 279 317 264 265 212 137 320 346",
        (
            "2 318 239 157 148 264 248 167 153 149 68 132 265 270 274 268 279 266 265 288 266 132 "
            "70 68 55 271 70 264 2"
        ),
        "2 264 353",
    ],
}

SAMPLES = [
    *GOLDEN_TEXTS, "", " ", "a", "word", " word", "  lead  and  trail  \n", "a\n\n\n b\t\tc\r\n\r\n", "     x        y",
    (
        "can't CAN'T I'll HE'S don't"
    ), "12345 1 ٣ 1998199819", "世界，一 你好。", "👍👩‍👩‍👧 naïve cafés e\u0301 ½²",
    "(a|b).\n\n::...!!!",
    (
        "<|endoftext|>a<s>b</s> \n c<|eot_id|>d <|end|>\n x"
    ), "<|im_start|>user\n<tool_call>{}</tool_call><|im_end|>",
    "<start_of_turn>user\n\n\n\nx<end_of_turn><table>", "[INST] hi [/INST]",
    "<|begin_of_text|>x", "<bos>x", "<s>x", "</s>x", "<s> x", "<unk>",
]  # fmt: skip
# Characters that the pipelines treat differently, words of the small vocabularies, and no text of
# an added token.
PIECES = st.sampled_from(
    ["a", "he", "the", "CA", "N", "'s", "'S", "n't", " ", "  ", "\n", "\t", "\r", ".", "!!", "(", "|", "1", "98", "٣",
     "½", "é", "e\u0301", "世", "界", "，", "👍", "👩", "\u200d", "Hello", "İ", "ſ"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: family.write(root / name) for name, family in FAMILIES.items()}


_loaded = {}


def load(path):
    if path not in _loaded:
        tokenizer = Tokenizer.from_path(path)
        assert tokenizer is not None
        _loaded[path] = tokenizer
    return _loaded[path]


@cache
def reference(name):
    """The tokenizer that `tokenizers` makes of the file, or `transformers` of OPT's files."""
    with TemporaryDirectory() as root:
        folder = FAMILIES[name].write(Path(root, name))
        if FAMILIES[name].single_file:
            return Backend.from_file(str(folder / "tokenizer.json"))
        return AutoTokenizer.from_pretrained(folder).backend_tokenizer


def expected(name, text):
    """Ids with BOS, which a text that brings its own does not get again."""
    ids = reference(name).encode(text).ids
    bos = FAMILIES[name].bos
    return ids[1:] if bos and text.startswith(bos) else ids


def normalize(name, text):
    return unicodedata.normalize("NFC", text) if name in ("gpt-neox", "qwen2") else text


def prefix_space(name):
    """What a sentencepiece family puts before a text and keeps in its first token."""
    return " " if FAMILIES[name].dummy else ""


# ---- golden ids ----


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_ids(folders, name):
    found = [load(folders[name]).encode(text) for text in GOLDEN_TEXTS]
    assert [" ".join(map(str, ids)) for ids in found] == GOLDEN[name]


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_the_file(folders, name):
    tokenizer = load(folders[name])
    assert tokenizer.encode_batch(SAMPLES) == [expected(name, text) for text in SAMPLES]
    plain = [reference(name).encode(text, add_special_tokens=False).ids for text in SAMPLES]
    assert tokenizer.encode_batch(SAMPLES, add_special_tokens=False) == plain
    # loading adds no token of its own
    assert tokenizer.vocab_size == reference(name).get_vocab_size()
    cut = [
        spelt
        for spelt in tokenizer.token_texts(tokenizer.encode("世界，👍"))
        if spelt.startswith("bytes:")
    ]
    assert len(cut) >= 4  # else this small vocabulary proves nothing of characters that are cut


@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].single_file])
@pytest.mark.parametrize("class_name", ["LlamaTokenizer", "Qwen2Tokenizer", "Unheard"])
def test_the_class_does_not_change_the_pipeline(tmp_path, name, class_name):
    """`transformers` rebuilds normalizer, pre-tokenizer and decoder by class; the file is what was
    published.
    """
    folder = FAMILIES[name].write(tmp_path / name)
    # the post-processor of the file decides, as it does in `transformers` 5
    for add_bos in (True, False):
        config = FAMILIES[name].config | {"tokenizer_class": class_name, "add_bos_token": add_bos}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.from_path(folder)
        assert tokenizer is not None
        assert tokenizer.encode_batch(SAMPLES) == [expected(name, text) for text in SAMPLES]


# ---- BOS ----


@pytest.mark.parametrize("name", NAMES)
def test_none_or_one_bos(folders, name):
    tokenizer, bos = load(folders[name]), FAMILIES[name].bos
    assert bool(tokenizer.prefix) == (bos is not None)
    if bos is None:
        assert tokenizer.encode("word") == tokenizer.encode("word", add_special_tokens=False)
        assert tokenizer.encode("") == []
        return
    assert (tokenizer.bos_text, tokenizer.bos_id) == (bos, reference(name).token_to_id(bos))
    assert tokenizer.encode("") == tokenizer.encode(bos) == [tokenizer.bos_id]
    for text in ("word", " word", "\n", "世"):
        ids = tokenizer.encode(text)
        assert ids.count(tokenizer.bos_id) == 1
        assert ids[0] == tokenizer.bos_id
        # HELM knows a context token by its text alone
        sent_back = tokenizer.encode(tokenizer.decode(ids))
        assert sent_back.count(tokenizer.bos_id) == 1
        # One that somebody put into the text himself is a token wherever it is, and stays.
        assert tokenizer.encode(bos + bos + text)[:2] == [tokenizer.bos_id] * 2
        assert tokenizer.encode(text + bos).count(tokenizer.bos_id) == 2


# ---- word borders ----

CONTEXTS = [
    "the cat",
    "Hello",
    "1998",
    "the cat.",
    "can't",
    "世界",
    "(a)",
    "é",
    "x\n\n",
    "the\tcat",
]


@pytest.mark.parametrize("name", NAMES)
def test_words_are_split_at_their_borders(folders, name):
    """What lets a target be scored as the last tokens of context and target: the context's ids stay
    as they were.
    """
    tokenizer = load(folders[name])
    for context in CONTEXTS:
        for target in (" word", " Hello the", " cat's", " 98", " 世"):
            alone, both = tokenizer.encode(context), tokenizer.encode(context + target)
            assert both[: len(alone)] == alone
            tail = both[len(alone) :]
            assert b"".join(map(tokenizer.token_bytes, tail)) == target.encode("utf-8")
            # The trap: encoded by itself, a sentencepiece target gets a second space, and so other
            # tokens.
            by_itself = tokenizer.encode(target, add_special_tokens=False)
            data = b"".join(map(tokenizer.token_bytes, by_itself))
            doubled = FAMILIES[name].dummy == "every"
            assert data == (" " * doubled + target).encode("utf-8")
            assert (by_itself == tail) == (not doubled)
            if target == " word":
                assert len(by_itself) == len(tail) + doubled


# ---- bytes ----


@settings(max_examples=40, deadline=None)
@given(TEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_prefix_has_the_bytes_of_the_text(folders, name, text):
    tokenizer = load(folders[name])
    ids = tokenizer.encode(text, add_special_tokens=False)
    leads = (
        prefix_space(name) if FAMILIES[name].dummy == "every" or not text.startswith(" ") else ""
    )
    want = (leads + normalize(name, text) if text else "").encode("utf-8")
    assert tokenizer.decode(ids).encode("utf-8") == want
    seen = b""
    for token_id, spelt in zip(ids, tokenizer.token_texts(ids)):
        data = tokenizer.token_bytes(token_id)
        assert data
        seen += data
        assert want.startswith(seen)
        # HELM's spelling of a token loses nothing either.
        hexadecimal = re.fullmatch(r"bytes:((?:\\x[0-9a-f]{2})+)", spelt)
        assert data == (
            bytes.fromhex(hexadecimal[1].replace("\\x", ""))
            if hexadecimal
            else spelt.encode("utf-8")
        )
    assert seen == want


def test_what_pipelines_change_or_drop_is_theirs(folders):
    def through(name, text):
        tokenizer = load(folders[name])
        return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))

    assert through("phi3", "a<|end|> \n\n b</s>\n<s>\nc") == " a<|end|> b</s><s> \nc"
    assert through("llama2", "a<s>b") == " a<s> b"  # the space before every stretch
    assert through("mistral-v0.3", "a<s>b") == " a<s>b"  # the space before the first only
    assert through("qwen2", "e\u0301<tool_call>") == "é<tool_call>"
    assert through("gpt2", "e\u0301 ²") == "e\u0301 ²"


# ---- files that are not all there ----


def test_tokenizer_model_alone_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(FAMILIES["llama2"].config))
    with pytest.raises(
        CheckpointError,
        match=(r"only as tokenizer\.model, .* put the model's tokenizer\.json beside it"),
    ):
        Tokenizer.from_path(tmp_path)


@pytest.mark.parametrize("missing", ["merges.txt", "tokenizer_config.json"])
def test_opt_without_one_of_its_files_is_refused(tmp_path, missing):
    folder = FAMILIES["opt"].write(tmp_path / "opt")
    (folder / "config.json").write_text(json.dumps({"model_type": "opt"}))
    assert Tokenizer.from_path(folder) is not None
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=f"vocab.json without {missing}"):
        Tokenizer.from_path(folder)


# Entries of `tokenizer_config.json`, beside chat templates (tests/tokenizer/test_chat.py).
ENTRIES = [
    {"add_prefix_space": True}, {"add_prefix_space": False}, {"split_special_tokens": True},
    {"legacy": False}, {"do_lower_case": True}, {"clean_up_tokenization_spaces": True},
    {"model_max_length": 3}, {"errors": "ignore"},
    {"truncation_side": "left", "padding_side": "left"}, {"add_bos_token": True},
    {"add_bos_token": False}, {"add_eos_token": True}, {"additional_special_tokens": ["fox"]},
    {"extra_special_tokens": {"image_token": "fox"}}, {"eos_token": "fox"}, {"from_slow": True},
    {"sp_model_kwargs": {}}, {"spaces_between_special_tokens": True},
    {"use_default_system_prompt": True}, {"tokenizer_file": "elsewhere.json"},
    {"processor_class": "Other"},
]  # fmt: skip
REFUSED = ({"add_prefix_space": True}, {"split_special_tokens": True})


@pytest.mark.fast(12)
@pytest.mark.parametrize("name", ["gpt-neox", "qwen2"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_entries_of_the_configuration_have_the_ids_of_transformers_or_are_refused(
    tmp_path, name, entry
):
    folder = FAMILIES[name].write(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entry}))
    if entry in REFUSED:
        with pytest.raises(CheckpointError, match=f"sets {next(iter(entry))} to True"):
            Tokenizer.from_path(folder)
        return
    ours, theirs = Tokenizer.from_path(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("the quick brown fox", "  two  spaces", "Hello World", "ünï\n\ncode 3.14", "a"):
        assert ours.encode(text) == theirs(text)["input_ids"], text
