"""Small tokenizers with the pipeline of each family's published files, and a slow encoder that shares no code with it.

Only the vocabularies are ours: a few merges that come out differently as soon as one step of a pipeline is lost.
`19 98` spans digits that some families split, `.\\n` spans a border that GPT-2 keeps, no order of merges reaches
` Hello`, and of most Chinese characters and emoji a token holds only some bytes.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regex

Merge = tuple[str, str]

# ---- published patterns ----

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _GPT4.replace("DIGITS", r"\p{N}{1,3}")
QWEN2 = _GPT4.replace("DIGITS", r"\p{N}")
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # as published: a class within a class
BLOOM_FLAT = r" ?[^()\s|.,!?…。，、।۔،]+"  # what it means
GALACTICA = r"""[\(\)\[\]\{\}]|([!"\#\$%\&'\*\+,\-\./:;<=>\?\\\^_`\|\~])\1*"""
GALACTICA_MARKER = "SPL1T-TH1S-Pl3A5E"
DIGIT = r"\p{Nd}|\p{Nl}|\p{No}"


def split(pattern: str, kind: str = "Regex", behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": False}


def byte_level(use_regex: bool, trim_offsets: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trim_offsets, "use_regex": use_regex}


def in_order(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


DIGITS = {"type": "Digits", "individual_digits": True}
BYTES_DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
SPACE_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACE_TO_MARK]}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
_UNMARK = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
MARKS_DECODER = {"type": "Sequence", "decoders": _UNMARK}
STRIPPING_DECODER = {
    "type": "Sequence",
    "decoders": [*_UNMARK, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
}


def bos_template(token: str, token_id: int) -> dict[str, Any]:
    def piece(kind: str, name: str, type_id: int) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": type_id}}

    single = [piece("SpecialToken", token, 0), piece("Sequence", "A", 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, piece("SpecialToken", token, 1), piece("Sequence", "B", 1)],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


# ---- vocabularies ----


def gpt2_alphabet() -> list[str]:
    """The stand-in of byte 0, 1, … 255."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_in, others = [], 0
    for byte in range(256):
        stand_in.append(chr(byte) if byte in shown else chr(256 + others))
        others += byte not in shown
    return stand_in


ALPHABET = gpt2_alphabet()


def as_bytes(text: str) -> str:
    return "".join(ALPHABET[byte] for byte in text.encode("utf-8"))


# Each is merged from the left: "the" gives t+h, th+e. The order is the rank.
WORDS = [" the", " word", " cat", "'s", "'S", "'ll", "he", "CA", "n't", "19", "98", "1998", "199", "  ", "    ",
         "\n\n", ".\n", "!!", "é", "e\u0301", "\t\t", "Hello", " Hello", "...", ").", "::", "  \n"]  # fmt: skip
# Bytes of characters: E4 B8 begins 世 and 一, 96 E7 straddles 世界, F0 9F 91 begins 👍 and 👩.
BYTE_WORDS = [b"\xe4\xb8", b"\x96\xe7", b"\xf0\x9f", b"\xf0\x9f\x91", b"\xef\xbc", b"\xe3\x80"]


def merges_of(words: list[str]) -> list[Merge]:
    merges: dict[Merge, None] = {}
    for word in words:
        whole, i = word[0], 1
        while i < len(word):
            merges[whole, word[i]] = None
            whole, i = whole + word[i], i + 1
    return list(merges)


BYTE_MERGES = merges_of([as_bytes(word) for word in WORDS] + ["".join(ALPHABET[b] for b in w) for w in BYTE_WORDS])
MARK_CHARACTERS = "▁etaoinshrdlucmfwypvbgkjxqzHCASTI0123456789.,!?'\":()-é世\n\t"
MARK_MERGES = merges_of([word.replace(" ", "▁") for word in WORDS if "e\u0301" not in word and ")." not in word])


def byte_level_pieces() -> list[str]:
    return list(dict.fromkeys([*sorted(ALPHABET), *(a + b for a, b in BYTE_MERGES)]))


def marked_pieces() -> list[str]:
    return list(dict.fromkeys([*MARK_CHARACTERS, *(a + b for a, b in MARK_MERGES)]))


FALLBACKS = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True)
class Added:
    """A token of the list `added_tokens`. rstrip: it swallows the white space behind it."""

    text: str
    special: bool = True
    rstrip: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class Family:
    """front/back: added tokens below and above the vocabulary's ids; the rest as tokenizer.json calls it.

    For the slow encoder: `splits` in order (a pattern, and whether its matches are removed), `normalize`, and `dummy`,
    where sentencepiece puts its space: before "every" stretch between added tokens, at the "first", or nowhere ("").
    """

    name: str
    config: dict[str, Any]
    marked: bool = False
    front: tuple[Added, ...] = ()
    back: tuple[Added, ...] = ()
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: Callable[[dict[str, int]], dict[str, Any] | None] = lambda vocab: None
    decoder: dict[str, Any] = field(default_factory=lambda: BYTES_DECODER)
    ignore_merges: bool = False
    bos: str | None = None
    single_files: bool = True
    splits: tuple[tuple[str, bool], ...] = ()
    normalize: Callable[[str], str] = str
    dummy: str = ""

    @property
    def merges(self) -> list[Merge]:
        return MARK_MERGES if self.marked else BYTE_MERGES

    @property
    def vocab(self) -> dict[str, int]:
        middle = [*FALLBACKS, *marked_pieces()] if self.marked else byte_level_pieces()
        return {piece: i for i, piece in enumerate([*(a.text for a in self.front), *middle])}

    @property
    def ids(self) -> dict[str, int]:
        """The vocabulary with the added tokens behind it."""
        vocab = self.vocab
        return vocab | {added.text: len(vocab) + i for i, added in enumerate(self.back)}

    def write(self, folder: Path) -> Path:
        """Save as the family's repository has it: tokenizer.json, or vocab.json and merges.txt (OPT)."""
        folder.mkdir(parents=True)
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config), encoding="utf-8")
        if self.single_files:
            content = json.dumps(self.as_json(), ensure_ascii=False)
            (folder / "tokenizer.json").write_text(content, encoding="utf-8")
        else:
            lines = ["#version: 0.2", *(" ".join(merge) for merge in self.merges), ""]
            (folder / "vocab.json").write_text(json.dumps(self.vocab), encoding="utf-8")
            (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
        return folder

    def as_json(self) -> dict[str, Any]:
        ids = self.ids
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": ids[added.text], "content": added.text, "single_word": False, "lstrip": False,
                    "rstrip": added.rstrip, "normalized": added.normalized, "special": added.special,
                }
                for added in (*self.front, *self.back)
            ],
            "normalizer": self.normalizer,
            "pre_tokenizer": self.pre_tokenizer,
            "post_processor": self.post_processor(ids),
            "decoder": self.decoder,
            "model": {
                "type": "BPE", "dropout": None, "unk_token": "<unk>" if self.marked else None,
                "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": self.marked,
                "byte_fallback": self.marked, "ignore_merges": self.ignore_merges, "vocab": self.vocab,
                "merges": [list(merge) for merge in self.merges],
            },
        }  # fmt: skip


# ---- the slow encoder ----


def slow_encode(family: Family, text: str, bos: bool = True) -> list[int]:
    """Ids of `text`, computed step by step as the published pipeline says, with `bos` in front where it is usual."""
    vocab, ids = family.ids, []
    ranks = {merge: rank for rank, merge in enumerate(family.merges)}
    for stretch, is_added, at_start in _cut_at_added(family, text):
        if is_added:
            ids.append(vocab[stretch])
            continue
        stretch = family.normalize(stretch)
        if family.marked:
            stretch = stretch.replace(" ", "▁")
            if family.dummy == "every" or (family.dummy == "first" and at_start and not stretch.startswith("▁")):
                stretch = "▁" + stretch
        pieces = [stretch]
        for pattern, removed in family.splits:
            pieces = [part for piece in pieces for part in _isolate(pattern, piece, removed)]
        for piece in pieces:
            spelt = piece if family.marked else as_bytes(piece)
            if family.ignore_merges and spelt in vocab:
                ids.append(vocab[spelt])
                continue
            symbols = [part for char in spelt for part in ([char] if char in vocab else _fallback(char))]
            ids.extend(vocab[symbol] for symbol in _merge(symbols, ranks))
    return [vocab[family.bos], *ids] if bos and family.bos else ids


def _cut_at_added(family: Family, text: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield (stretch, whether it is an added token, whether it begins the text)."""
    added = sorted((*family.front, *family.back), key=lambda one: -len(one.text))
    if not family.single_files:
        added = [one for one in added if one.text in {"</s>", "<pad>"}]  # those that OPT's configuration names
    strips = {one.text: one.rstrip for one in added}
    pattern = regex.compile("|".join(regex.escape(one.text) for one in added))
    at = 0
    while match := pattern.search(text, at):
        if match.start() > at:
            yield text[at : match.start()], False, at == 0
        yield match[0], True, match.start() == 0
        at = match.end()
        while strips[match[0]] and at < len(text) and text[at].isspace():
            at += 1
    if at < len(text):
        yield text[at:], False, at == 0


def _isolate(pattern: str, piece: str, removed: bool) -> Iterator[str]:
    at = 0
    for match in regex.finditer(pattern, piece):
        if match.start() > at:
            yield piece[at : match.start()]
        if match[0] and not removed:
            yield match[0]
        at = match.end()
    if at < len(piece):
        yield piece[at:]


def _fallback(char: str) -> list[str]:
    return [FALLBACKS[byte] for byte in char.encode("utf-8")]


def _merge(symbols: list[str], ranks: dict[Merge, int]) -> list[str]:
    while len(symbols) > 1:
        rank, at = min((ranks.get((a, b), len(ranks)), i) for i, (a, b) in enumerate(zip(symbols, symbols[1:])))
        if rank == len(ranks):
            break
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    return symbols


# ---- the families ----


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _plain(*texts: str, **options: bool) -> tuple[Added, ...]:
    return tuple(Added(text, **options) for text in texts)


def _bytes_post_processor(vocab: dict[str, int]) -> dict[str, Any]:
    return byte_level(True, trim_offsets=False)


_OPT_TOKEN = {"content": "</s>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": True}
_SENTENCEPIECE = _plain("<unk>", "<s>", "</s>")
_LLAMA_CONFIG = {
    "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>",
    "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None, "legacy": True, "sp_model_kwargs": {},
    "clean_up_tokenization_spaces": False, "use_default_system_prompt": False,
}  # fmt: skip
_GEMMA_CONFIG = {
    "tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>",
    "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "sp_model_kwargs": {},
    "clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False,
}  # fmt: skip
_QWEN_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False, "bos_token": None,
    "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace",
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "split_special_tokens": False,
    "clean_up_tokenization_spaces": False,
}  # fmt: skip
_PHI3_STRIPPING = ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")


def _sentencepiece(name: str, config: dict[str, Any], **changes: Any) -> Family:
    settings: dict[str, Any] = dict(
        marked=True, front=_SENTENCEPIECE, normalizer=PREPEND, decoder=STRIPPING_DECODER, bos="<s>", dummy="every",
        post_processor=lambda vocab: bos_template("<s>", 1),
    )  # fmt: skip
    return Family(name, config, **{**settings, **changes})


_ALL = [
    Family(
        "opt",
        {
            "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, "errors": "replace",
            "bos_token": {**_OPT_TOKEN, "__type": "AddedToken"}, "eos_token": {**_OPT_TOKEN, "__type": "AddedToken"},
            "unk_token": {**_OPT_TOKEN, "__type": "AddedToken"},
            "pad_token": {**_OPT_TOKEN, "content": "<pad>", "__type": "AddedToken"},
        },
        front=_plain("<s>", "<pad>", "</s>", "<unk>"),
        bos="</s>",
        single_files=False,
        splits=((GPT2, False),),
    ),
    Family(
        "gpt2",
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "model_max_length": 1024},
        back=_plain("<|endoftext|>"),
        pre_tokenizer=byte_level(True),
        post_processor=_bytes_post_processor,
        splits=((GPT2, False),),
    ),
    Family(
        "gpt-neox",
        {
            "tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False, "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
        },
        front=_plain("<|endoftext|>", "<|padding|>"),
        back=_plain(*(" " * n for n in range(8, 4, -1)), special=False, normalized=True),
        normalizer={"type": "NFC"},
        pre_tokenizer=byte_level(True),
        post_processor=_bytes_post_processor,
        splits=((GPT2, False),),
        normalize=_nfc,
    ),
    Family(
        "bloom",
        {
            "tokenizer_class": "BloomTokenizerFast", "add_prefix_space": False, "bos_token": "<s>",
            "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>",
        },
        front=_plain("<unk>", "<s>", "</s>", "<pad>"),
        pre_tokenizer=in_order(split(BLOOM), byte_level(False)),
        post_processor=_bytes_post_processor,
        splits=((BLOOM_FLAT, False),),
    ),
    _sentencepiece("llama2", _LLAMA_CONFIG),
    _sentencepiece("mixtral", {**_LLAMA_CONFIG, "additional_special_tokens": []}),
    _sentencepiece(
        "mistral-v0.3",
        {**_LLAMA_CONFIG, "legacy": False},
        front=(*_SENTENCEPIECE, *_plain("[INST]", "[/INST]")),
        normalizer=None,
        pre_tokenizer=METASPACE,
        dummy="first",
    ),
    _sentencepiece(
        "phi3",
        {**_LLAMA_CONFIG, "add_bos_token": False, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
         "legacy": False},
        front=(Added("<unk>"), Added("<s>"), Added("</s>", special=False, rstrip=True)),
        back=(Added("<|endoftext|>"), *_plain(*_PHI3_STRIPPING, rstrip=True)),
        post_processor=lambda vocab: None,
        bos=None,
    ),  # fmt: skip
    Family(
        "llama3",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>", "clean_up_tokenization_spaces": True,
        },
        back=_plain("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        pre_tokenizer=in_order(split(LLAMA3), byte_level(False)),
        post_processor=lambda vocab: {
            "type": "Sequence",
            "processors": [
                byte_level(True, trim_offsets=False),
                bos_template("<|begin_of_text|>", vocab["<|begin_of_text|>"]),
            ],
        },
        ignore_merges=True,
        bos="<|begin_of_text|>",
        splits=((LLAMA3, False),),
    ),
    *(
        Family(
            name,
            _QWEN_CONFIG,
            back=(
                *_plain("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
                *_plain("<tool_call>", "</tool_call>", special=False),
            ),
            normalizer={"type": "NFC"},
            pre_tokenizer=in_order(split(QWEN2), byte_level(False, trim_offsets=False)),
            post_processor=_bytes_post_processor,
            splits=((QWEN2, False),),
            normalize=_nfc,
        )
        for name in ("qwen2", "qwen3")
    ),
    *(
        _sentencepiece(
            name,
            _GEMMA_CONFIG | more,
            front=(
                *_plain("<pad>", "<eos>", "<bos>", "<unk>"),
                *_plain("<mask>", "<unused0>", special=False),
                *_plain("<start_of_turn>", "<end_of_turn>"),
            ),
            back=_plain("\n\n\n", "\n\n\n\n", "<table>", special=False),
            normalizer=SPACE_TO_MARK,
            pre_tokenizer=split(" ", "String", "MergedWithPrevious"),
            decoder=MARKS_DECODER,
            post_processor=lambda vocab: bos_template("<bos>", 2),
            bos="<bos>",
            dummy="",
        )
        for name, more in (
            ("gemma2", {"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]}),
            ("gemma3", {"eos_token": "<end_of_turn>", "extra_special_tokens": {"image_token": "<unused0>"}}),
        )
    ),
    Family(
        "smollm2",
        {
            "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
        front=_plain("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        pre_tokenizer=in_order(DIGITS, byte_level(True)),
        splits=((DIGIT, False), (GPT2, False)),
    ),
    Family(
        "galactica",
        {"tokenizer_class": "PreTrainedTokenizerFast", "name_or_path": "galactica"},
        front=_plain("<s>", "<pad>", "</s>", "<unk>", "[START_REF]", "[END_REF]"),
        normalizer={"type": "NFKC"},
        pre_tokenizer=in_order(
            split(GALACTICA_MARKER, "String", "Removed"),
            DIGITS,
            split(GALACTICA),
            split("\n", "String"),
            byte_level(True),
        ),
        splits=((GALACTICA_MARKER, True), (DIGIT, False), (GALACTICA, False), ("\n", False), (GPT2, False)),
        normalize=_nfkc,
    ),
]  # fmt: skip
FAMILIES = {family.name: family for family in _ALL}
