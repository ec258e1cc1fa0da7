"""Tokenizers out of GGUF files: splits and merges against `transformers`, keys and drawn texts
against llama.cpp.
"""

import gc
import json
import random
import weakref
from functools import cache
from itertools import pairwise
from unicodedata import normalize
from urllib.request import Request, urlopen

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from flexgen_helm.checkpoint.gguf_header import read_gguf_header
from flexgen_helm.concurrency import stopped_by
from flexgen_helm.errors import CheckpointError, Interrupted, UnsupportedArchitectureError
from flexgen_helm.progress import describe, observed_by
from flexgen_helm.tokenizer.gguf_tokenizer import IRRELEVANT, NEUTRAL
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.gguf_files import SMALL_TOKENIZER, Kind, llama_cpp, write_gguf
from tests.helpers.tokenizers_by_family import LLAMA3

CORPUS = [
    "In 1998 and 2024 the price was 3.14 or 1234567 euros; it's 1998 again, and 99 9999 more.",
    "def f(x):\n    return x + 1\n\n\nprint(f(22))  # the café is THERE'S\r\n\r\n",
    (
        "The quick brown fox jumps over the lazy dog,  and   the dog does not mind; aaaa banana "
        "papaya."
    ),
] * 3
SAMPLES = [
    *CORPUS[:3], "日本語の文章です。 ½ ² ٣٤ 👍👍 e\u0301", "", " 1", "  1", " ½", "x ²", "1234567", "\n \n", "it'S",
    "a<|end|>b", "<|end|>",
]  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|endoftext|>", "<tool>"]
CONTROL, USER, UNKNOWN = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNKNOWN
NORMAL = gguf.TokenType.NORMAL
TYPES = [UNKNOWN, CONTROL, CONTROL, CONTROL, CONTROL, CONTROL, USER]
PARTS = [
    *SPECIAL, " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "the", " dog", "The", "ban", "ana", "aaa", "it's", "1998",
    "12", "½", "é", "日本", "👍", "\x00", "<0x41>", "<", ">", "\u00a0", "print(", "...", "'S", "_",
    "▁",
]  # fmt: skip
# Of llama.cpp (LLM_KV_TOKENIZER_…), with a value that would change something if anything did.
ID_KEYS = (
    "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask", "fim_pre",
    "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle",
)  # fmt: skip
KEYS = {
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


def ggml(**keys):
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


@cache
def learn(model):
    """Pieces and merges of a tokenizer that was shown no word borders: only a split keeps digits
    apart.
    """
    learnt = Backend(models.BPE())
    if model == "llama":
        learnt.pre_tokenizer = pre_tokenizers.Metaspace()
        learnt.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=220, show_progress=False))
    else:
        learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        lines = [piece for line in CORPUS for piece in (line, *line.split(" "))]
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=alphabet, show_progress=False
        )
        learnt.train_from_iterator(lines, trainer)
    content = json.loads(learnt.to_str())["model"]
    return sorted(content["vocab"], key=content["vocab"].__getitem__), [
        tuple(merge) for merge in content["merges"]
    ]


def vocabulary(model):
    """Keys of a tokenizer that learnt a corpus."""
    pieces, merges = learn(model)
    if model == "llama":
        order = {"".join(merge): rank for rank, merge in enumerate(merges)}
        return sentencepiece(
            {piece: -float(order.get(piece, 1000 + i)) for i, piece in enumerate(pieces)}
        )
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [*SPECIAL, *pieces],
        "tokenizer.ggml.token_type": [*TYPES, *[NORMAL] * len(pieces)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write(path, keys, name="drawn"):
    """A model of one layer with these keys; None leaves one out."""
    sizes = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 32,
    }
    sizes |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    tokens = len(keys["tokenizer.ggml.tokens"])
    shapes = {"token_embd": (tokens, 32), "output": (tokens, 32), "output_norm": (32,)}
    shapes |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{part}": (32, 32) for part in ("gate", "up", "down")}
    shapes |= {f"blk.0.{part}_norm": (32,) for part in ("attn", "ffn")}
    tensors = (
        (f"{tensor}.weight", np.ones(shape, np.float32), Kind.F32)
        for tensor, shape in shapes.items()
    )
    return write_gguf(
        path,
        "llama",
        {"general.name": name, **{f".{key}": value for key, value in sizes.items()}, **keys},
        tensors,
    )


def theirs(path, texts):
    """Token ids by llama.cpp, with special tokens in front, and where the text names them."""
    xllamacpp, settings = llama_cpp(path, 64)
    server, found = xllamacpp.Server(settings), []
    for text in texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        asked = Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urlopen(asked, timeout=30) as answer:
            found.append(json.load(answer)["tokens"])
    return found


def drawn_texts(seed, count=60):
    draw = random.Random(seed)
    yield from [*CORPUS[:3], " ", "  a", "\n", " the", "<|user|>\nhi<|end|>\n  <tool> x"]
    for _ in range(count):
        text = "".join(draw.choices(PARTS, k=draw.randint(1, 8)))
        if not text.startswith(("<s>", "<|endoftext|>")):  # a second BOS is left out here
            yield text


def load(path):
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    return tokenizer


# ---- against transformers ----


CONTRACTIONS, SPACES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER, FIRST = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
    r"[^\r\n\p{L}\p{N}]?",
)
PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
# The patterns of the models' own tokenizer.json, by which a text is split one after another.
PUBLISHED = {
    "llama-bpe": [LLAMA3],
    "qwen2": [CONTRACTIONS + "|" + FIRST + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES],
    "glm4": [CONTRACTIONS + "|" + FIRST + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES],
    "seed-coder": [CONTRACTIONS + "|" + FIRST + r"\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + SPACES],
    "gpt-4o": [
        f"{FIRST}{UPPER}*{LOWER}+{CONTRACTIONS}?|{FIRST}{UPPER}+{LOWER}*{CONTRACTIONS}?"
        + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
    ],
    "tekken": [f"{FIRST}{UPPER}*{LOWER}+|{FIRST}{UPPER}+{LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + SPACES,
    ],
}  # fmt: skip
PUBLISHED["llama4"] = PUBLISHED["minimax-m2"] = PUBLISHED["gpt-4o"]
PUBLISHED["hunyuan"], PUBLISHED["hunyuan-dense"] = PUBLISHED["qwen2"], PUBLISHED["deepseek-v3"]
PUBLISHED["dbrx"] = PUBLISHED["chatglm-bpe"] = PUBLISHED["lfm2"] = PUBLISHED["glm4"]
CHARACTERS = [
    *"aAzZéÉßǅʰ世あ１½٣19 \t\n\r'\".,-/_|~[]{}@#`^\\$€👍\u0301\u200d\u00a0ـ",
    "'s", "'LL", "  ", "\n\n", "hello", "HTTPServer", "can't", "123456", " x",
]  # fmt: skip


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", *PUBLISHED, "qwen35"])
def test_texts_are_split_by_the_models_own_patterns(tmp_path, pre):
    content = {**vocabulary("gpt2"), "tokenizer.ggml.pre": pre}
    tokenizer = load(write(tmp_path / "m.gguf", content))
    vocab = {token: i for i, token in enumerate(content["tokenizer.ggml.tokens"])}
    if pre == "qwen35":
        reference = Qwen3_5Tokenizer(vocab=vocab, merges=learn("gpt2")[1]).backend_tokenizer
    else:
        reference = Backend(
            models.BPE(vocab=vocab, merges=learn("gpt2")[1], ignore_merges=pre == "llama-bpe")
        )
        splits = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PUBLISHED.get(pre, [])
        ]
        splits += [pre_tokenizers.Digits(individual_digits=True)] * (pre == "smollm")
        bytes_ = pre_tokenizers.ByteLevel(False, use_regex=pre in ("gpt-2", "smollm"))
        reference.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
        reference.normalizer = normalizers.NFC() if pre == "qwen2" else None
    reference.add_special_tokens(SPECIAL)
    draw = random.Random(pre)
    for text in [
        *SAMPLES,
        *("".join(draw.choices(CHARACTERS, k=draw.randint(1, 14))) for _ in range(400)),
    ]:
        cuts = [one.pre_tokenizer.pre_tokenize_str(text) for one in (reference, tokenizer._backend)]
        assert [piece for piece, _ in cuts[0]] == [piece for piece, _ in cuts[1]], text
        if pre != "lfm2":  # whole words of its vocabulary are tokens
            ids = tokenizer.encode(text, False)
            assert ids == reference.encode(text, add_special_tokens=False).ids, text
            assert tokenizer.decode(ids) == (
                normalize("NFC", text) if pre.startswith("qwen") else text
            )


def merged_leftmost(text, scores):
    """Sentencepiece's merging, step by step: the best piece that two neighbours form, the leftmost
    of equal ones.
    """
    pieces = list(text)
    while True:
        formed = [
            (-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores
        ]
        if not formed:
            return pieces
        _, i = min(formed)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def sentencepiece(scores):
    """Keys of a vocabulary of special tokens, bytes, and pieces with these scores."""
    pieces = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *scores],
        "tokenizer.ggml.token_type": [
            *TYPES,
            *[gguf.TokenType.BYTE] * 256,
            *[NORMAL] * len(scores),
        ],
        "tokenizer.ggml.scores": [0.0] * len(pieces) + list(scores.values()),
    }


def test_runs_of_spaces_of_one_score_are_cut_from_the_left(tmp_path):
    """As Llama 2's and Phi-3's vocabularies have them; where another piece has that score too, the
    order is unknown.
    """
    words = ["▁", "a", "b", "n", "ab", "▁a", "▁b", "an", "▁ab", "ban", "▁ban"]
    runs = ["▁" * length for length in range(2, 6)]
    scores = {word: -float(i) for i, word in enumerate(words)} | dict.fromkeys(runs, -1e9)
    content = sentencepiece(scores)
    tokenizer = load(write(tmp_path / "m.gguf", content))
    draw = random.Random(4)
    for _ in range(500):
        text = "".join(
            draw.choices([" ", "   ", " " * 6, "a", "b", "ban", " b"], k=draw.randint(1, 9))
        )
        found = [
            content["tokenizer.ggml.tokens"][i]
            for i in tokenizer.encode(text, add_special_tokens=False)
        ]
        assert found == merged_leftmost("▁" + text.replace(" ", "▁"), scores), text
    for number, change in enumerate(({"▁ban": -1e9}, {"a▁": -50.0, "▁▁▁▁▁": -1e9})):
        with pytest.raises(CheckpointError, match="the same score"):
            load(write(tmp_path / f"{number}.gguf", sentencepiece(scores | change)))


def test_bos_eos_and_user_defined_tokens(tmp_path):
    content = {**vocabulary("gpt2"), **BOTH, "tokenizer.chat_template": "{{ 1 }}"}
    tokenizer = load(write(tmp_path / "m.gguf", content))
    assert tokenizer.encode("<tool>") == tokenizer.encode("<s><tool>") == [1, 6]  # no EOS
    assert tokenizer.decode([1, 6]) == "<s><tool>"
    assert tokenizer.apply_chat_template([]) == "1"


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_from_scores(tmp_path, prefix):
    """A 'llama' vocabulary has scores and no merges; both describe the same segmentation."""
    content = {**vocabulary("llama"), "tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = load(write(tmp_path / "m.gguf", content))
    with stopped_by(lambda: True), pytest.raises(Interrupted):
        load(write(tmp_path / "stopped.gguf", content))
    vocab = {token: i for i, token in enumerate(content["tokenizer.ggml.tokens"])}
    model = models.BPE(
        vocab=vocab, merges=learn("llama")[1], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    reference, space = Backend(model), [normalizers.Replace(" ", "▁")]
    reference.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *space] if prefix else space
    )
    reference.add_special_tokens(SPECIAL)
    for text in [*SAMPLES, "price 🦊 </s>"]:
        got = tokenizer.encode(text)
        assert got == [1, *reference.encode(text).ids], text
        if "<" not in text:
            assert tokenizer.decode(got) == "<s>" + (" " if prefix and text else "") + text


@pytest.mark.parametrize("name", ["Phi-3 mini", "Phi 3.5 Mini Instruct", "another"])
def test_ends_of_turns_and_space_behind_phi3s_tokens(tmp_path, name):
    """llama.cpp knows both by texts: ends by their own, the space by the model's name. It does not
    know the name that gguf's converter gives.
    """
    content = vocabulary("gpt2")
    content["tokenizer.ggml.tokens"].append("<|im_end|>")
    content["tokenizer.ggml.token_type"].append(NORMAL)
    tokenizer = load(write(tmp_path / "m.gguf", content, name))
    end = len(content["tokenizer.ggml.tokens"]) - 1
    assert (tokenizer.eos_ids, tokenizer.eos_text) == ({2, 4, 5, end}, "</s>")
    newline = tokenizer.encode("\n")
    assert tokenizer.encode("<|user|>\n<|im_end|>") == [
        3,
        *(newline if name == "another" else []),
        end,
    ]
    assert tokenizer.encode("<|endoftext|>\n") == [5, *newline]


def test_a_tokenizer_is_built_once_while_it_is_in_use(tmp_path):
    """HELM's threads and the engine of every precision ask for it; 262,144 pieces take four
    seconds.
    """
    built, path = (
        [],
        write(tmp_path / "m.gguf", SMALL_TOKENIZER | {"tokenizer.ggml.tokens": ["a", "b"]}),
    )
    with observed_by(built.append):
        first = load(path)
        assert load(path) is first and [describe(event) for event in built] == [
            "building the tokenizer: m.gguf"
        ]
        (tmp_path / "link.gguf").symlink_to(path)
        assert load(tmp_path / "link.gguf") is first
        write(path, SMALL_TOKENIZER | {"tokenizer.ggml.tokens": ["a", "b", "c"]})
        assert load(path).vocab_size == 3 and first.vocab_size == 2
    known = weakref.ref(first)
    del first
    gc.collect()
    assert known() is None


VOCABULARY = vocabulary("llama")["tokenizer.ggml.tokens"]
UNKNOWN_SPLIT = r"known are .*qwen2.*smollm.*gguf_new_metadata"
# Which vocabulary, what its file has instead, and what is said.
REFUSED = [
    ("gpt2", {"pre": "strange"}, f"'strange'.*{UNKNOWN_SPLIT}"),
    ("gpt2", {"pre": "default"}, f"'default'.*{UNKNOWN_SPLIT}"),  # no model's rule
    ("gpt2", {"pre": None}, f"None.*{UNKNOWN_SPLIT}"),
    ("gpt2", {"model": "bert"}, r"'bert'; known are gpt2, llama"),
    ("gpt2", {"token_type": [NORMAL] * 9}, r"m\.gguf"),
    ("gpt2", {"merges": ["a never-seen"]}, r"m\.gguf"),
    ("gpt2", {"bos_token_id": 10**6}, r"m\.gguf"),
    ("gpt2", {"pre": "llama-bpe", "bos_token_id": None}, "lacks 'tokenizer.ggml.bos_token_id'"),
    ("llama", {"scores": [-1.0]}, "have|does not fit"),
    # gguf's LlamaHfVocab writes this
    ("llama", {"scores": [-1000.0] * len(VOCABULARY)}, "the same score"),
    ("llama", {"scores": None}, "tokenizer.ggml.scores"),
    ("llama", {"tokens": [*VOCABULARY[:-1], VOCABULARY[-2]]}, "two tokens of the same text"),
]


@pytest.mark.parametrize("model, changes, message", REFUSED)
def test_what_is_unknown_or_does_not_fit_together_is_refused(tmp_path, model, changes, message):
    with pytest.raises((CheckpointError, UnsupportedArchitectureError), match=message):
        load(write(tmp_path / "m.gguf", vocabulary(model) | ggml(**changes)))


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    assert (
        Tokenizer.from_path(
            write(tmp_path / "none.gguf", {**vocabulary("gpt2"), "tokenizer.ggml.model": None})
        )
        is None
    )


# ---- against llama.cpp ----

LLAMA_CASES = {
    "plain": {},
    "no prefix": {"add_space_prefix": False},
    "BOS and EOS": {"add_bos_token": False, "add_eos_token": True},
    "other ids": {"bos_token_id": 5, "eos_token_id": 4, "add_eos_token": True},
}
CASES = [("llama", name, ggml(**keys)) for name, keys in LLAMA_CASES.items()]
CASES += [("phi3", "plain", {}), ("phi3", "no BOS", ggml(add_bos_token=False))]
PRE = (
    "gpt-2", "phi-2", "olmo", "smollm", "starcoder", "refact", "llama-bpe", "llama3", "llama-v3",
    "qwen2", "deepseek-r1-qwen",
)  # fmt: skip
CASES += [("gpt2", pre, ggml(pre=pre)) for pre in PRE]
BOTH = ggml(add_bos_token=True, add_eos_token=True)
CASES += [("gpt2", "BOS and EOS", ggml(pre="gpt-2") | BOTH)]


@pytest.mark.parametrize(
    "model, name, keys", CASES, ids=[f"{model}-{name}" for model, name, _ in CASES]
)
def test_token_ids_are_llama_cpps(tmp_path, model, name, keys):
    content = {**vocabulary("gpt2" if model == "gpt2" else "llama"), **keys}
    path = write(tmp_path / "m.gguf", content, "Phi-3 mini" if model == "phi3" else "drawn")
    # transformers strips \u00a0 as any white space, llama.cpp does not know it as such.
    texts = [text for text in drawn_texts(len(name)) if model != "phi3" or "\u00a0" not in text]
    end = -1 if keys.get("tokenizer.ggml.add_eos_token") else None
    assert load(path).encode_batch(texts) == [ids[:end] for ids in theirs(path, texts)]


# Keys of both, and every other one's with the one or the other.
BOTH_MODELS = (
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.add_bos_token",
)
KEY_CASES = [
    (model, key)
    for number, key in enumerate([*KEYS, *UNREAD])
    for model in (("llama", "gpt2") if key in BOTH_MODELS else [("llama", "gpt2")[number % 2]])
]


@pytest.mark.parametrize("model, key", KEY_CASES)
def test_every_key_of_llama_cpp_is_read_or_irrelevant_or_refused(tmp_path, model, key):
    content = vocabulary(model)
    plain = load(write(tmp_path / "plain.gguf", content))
    path = write(tmp_path / "m.gguf", {**content, key: KEYS.get(key, "x")})
    if key in UNREAD or (
        key in NEUTRAL and not (model == "llama" and key.endswith("add_space_prefix"))
    ):
        with pytest.raises(UnsupportedArchitectureError, match=f"has {key} = "):
            load(path)
        if key in NEUTRAL:
            neutral = {**content, key: NEUTRAL[key] if NEUTRAL[key] is False else None}
            assert load(write(tmp_path / "n.gguf", neutral)).encode(CORPUS[0])
        return
    texts = list(drawn_texts(1, 20))
    tokenizer = load(path)
    end = -1 if key == "tokenizer.ggml.add_eos_token" else None
    assert tokenizer.encode_batch(texts) == [ids[:end] for ids in theirs(path, texts)]
    if key in IRRELEVANT or key == "tokenizer.chat_template.tool_use":
        assert tokenizer.fingerprint == plain.fingerprint
    assert (9 in tokenizer.eos_ids) == any(
        key == f"tokenizer.ggml.{name}_token_id" for name in ENDS
    )


def test_metadata_equals_gguf_reader(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for number, (kind, value) in enumerate([
        ("uint8", 250), ("int64", -(2**40)), ("float32", 0.5), ("bool", True), ("string", "naïve\n"),
        ("array", ["x", "", "é"]), ("array", [1, -2, 3]), ("array", [0.25, 1e6]),
    ]):  # fmt: skip
        getattr(writer, f"add_{kind}")(str(number), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    want = {
        name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")
    }
    assert read_gguf_header(tmp_path / "m.gguf").metadata == want


# ---- the real one ----


@pytest.fixture(scope="session")
def smollm2(wheel_model):
    return load(wheel_model)


def test_smollm2_facts(smollm2):
    assert smollm2.vocab_size == 49_152
    assert (smollm2.bos_id, smollm2.bos_text, smollm2.prefix) == (1, "<|im_start|>", ())
    assert (smollm2.eos_ids, smollm2.eos_text) == ({0, 2}, "<|im_end|>")
    chat = smollm2.apply_chat_template(
        [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    )
    assert (
        chat
        == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


# '!' is 17 and printable ASCII follows in order, so '1' is 33; 'Ċ' (newline) is 198, 'Ġ' (space)
# 216, 'ĠĠ' 256, 'Â½' 16738. Digits are split off first: '  1' keeps its two spaces together, and '
# ½' does not lend its space to ½'s first byte, as the plain GPT-2 split would ([216, 216, 33] and
# [3351, 138]).
SMOLLM2_IDS = {
    "12345": [33, 34, 35, 36, 37],
    " 1998": [216, 33, 41, 41, 40],
    "  1": [256, 33],
    " ½": [216, 16738],
    "\n": [198],
    "hello world": [28120, 905],
    "  two  spaces": [216, 827, 216, 5600],
    "👍": [10813, 235, 231],
    "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
    " hello <|endoftext|>": [33662, 216, 0],
}


def test_smollm2_ids(smollm2):
    for text, ids in SMOLLM2_IDS.items():
        assert (smollm2.encode(text), smollm2.decode(ids)) == (ids, text)


# The vocabulary lacks 21 bytes (six control characters, lead bytes of unassigned planes); encoding
# drops them.
@settings(max_examples=100, deadline=None)
@given(
    st.text(
        st.characters(min_codepoint=0x20, max_codepoint=0x2FFF, exclude_characters="\x7f"),
        max_size=60,
    )
)
def test_smollm2_round_trip(smollm2, text):
    ids = smollm2.encode(text)
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode("utf-8")
