"""Small tokenizers with the pipeline of each kind of published files.

Only the vocabularies are ours: a few merges that come out differently as soon as one step of a
pipeline is lost.
`19 98` spans digits that some families split, `.\\n` spans a border that GPT-2 keeps, no order of
merges reaches ` Hello`, and of most Chinese characters and emoji a token holds only some bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from flexgen_helm.tokenizer.token_bytes import byte_alphabet

# As published.
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = _GPT4.replace("DIGITS", r"\p{N}{1,3}")
QWEN2 = _GPT4.replace("DIGITS", r"\p{N}")

# ---- vocabularies ----

_CHARACTER = {byte: char for char, byte in byte_alphabet().items()}
# Each is merged from the left: "the" gives t+h, th+e. The order is the rank.
WORDS = [" the", " word", " cat", "'s", "'S", "'ll", "he", "CA", "n't", "19", "98", "1998", "199", "  ", "    ",
         "\n\n", ".\n", "!!", "é", "e\u0301", "\t\t", "Hello", " Hello", "...", ").", "::", "  \n"]  # fmt: skip
# Bytes of characters: E4 B8 begins 世 and 一, 96 E7 straddles 世界, F0 9F 91 begins 👍 and 👩.
BYTE_WORDS = [b"\xe4\xb8", b"\x96\xe7", b"\xf0\x9f", b"\xf0\x9f\x91", b"\xef\xbc", b"\xe3\x80"]
MARK_CHARACTERS = "▁etaoinshrdlucmfwypvbgkjxqzHCASTI0123456789.,!?'\":()-é世\n\t"
MARKED_WORDS = [word.replace(" ", "▁") for word in WORDS if word not in ("e\u0301", ").")]


def merges_of(words):
    return list(dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word))))


BYTE_MERGES = merges_of(
    ["".join(map(_CHARACTER.get, word)) for word in [*map(str.encode, WORDS), *BYTE_WORDS]]
)
MARK_MERGES = merges_of(MARKED_WORDS)


@dataclass(frozen=True)
class Family:
    """Tokenizers with the same steps.

    config: its tokenizer_config.json.
    marked: sentencepiece's vocabulary, else one of bytes.
    front, back: added tokens with ids below and above the vocabulary's.
    bos: what encoding puts in front, None if nothing.
    dummy: where sentencepiece puts its space: before "every" stretch between added tokens, at the
        "first", or nowhere.
    single_file: tokenizer.json, else vocab.json and merges.txt.
    """

    config: dict[str, Any]
    marked: bool = False
    front: tuple[AddedToken, ...] = ()
    back: tuple[AddedToken, ...] = ()
    normalizer: Any = None
    pre_tokenizer: Any = field(
        default_factory=lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    decoder: Any = field(default_factory=decoders.ByteLevel)
    ignore_merges: bool = False
    bos: str | None = None
    dummy: str = ""
    single_file: bool = True

    def backend(self):
        if self.marked:
            pieces = [
                *(f"<0x{byte:02X}>" for byte in range(256)),
                *MARK_CHARACTERS,
                *map("".join, MARK_MERGES),
            ]
        else:
            pieces = [*sorted(byte_alphabet()), *map("".join, BYTE_MERGES)]
        names = dict.fromkeys([*(token.content for token in self.front), *pieces])
        backend = Tokenizer(
            models.BPE(
                vocab={name: i for i, name in enumerate(names)},
                merges=MARK_MERGES if self.marked else BYTE_MERGES,
                unk_token="<unk>" if self.marked else None,
                fuse_unk=self.marked,
                byte_fallback=self.marked,
                ignore_merges=self.ignore_merges,
            )
        )
        backend.add_tokens([*self.front, *self.back])
        for step in ("normalizer", "pre_tokenizer", "decoder"):
            if getattr(self, step) is not None:
                setattr(backend, step, getattr(self, step))
        if self.bos:
            backend.post_processor = begin_with(self.bos, backend.token_to_id(self.bos))
        return backend

    def write(self, folder):
        """Save as the family's repository has it."""
        folder.mkdir(parents=True)
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config), encoding="utf-8")
        if self.single_file:
            self.backend().save(str(folder / "tokenizer.json"))
        else:
            self.backend().model.save(str(folder))
        return folder


def begin_with(bos, bos_id):
    return processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])


# ---- the families ----


def _added(*texts, special=True, **options):
    return tuple(
        AddedToken(text, **{"normalized": False, "special": special, **options}) for text in texts
    )


def _pieces(pattern):
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_])


_SENTENCEPIECE = _added("<unk>", "<s>", "</s>")
_MARK = normalizers.Replace(" ", "▁")
_UNMARK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_LLAMA_CONFIG = {
    "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": True,
}  # fmt: skip


def _sentencepiece(config, **changes):
    steps = {
        "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), _MARK]),
        "pre_tokenizer": None,
        "decoder": decoders.Sequence([*_UNMARK, decoders.Strip(" ", 1, 0)]),
    }
    settings = {
        "marked": True,
        "front": _SENTENCEPIECE,
        "bos": "<s>",
        "dummy": "every",
        **steps,
        **changes,
    }
    return Family(config, **settings)


FAMILIES = {
    "opt": Family(  # BOS by the configuration's class
        {
            "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False,
            "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>",
        },
        front=_added("<s>", "<pad>", "</s>", "<unk>"),
        bos="</s>",
        single_file=False,
    ),
    "gpt2": Family({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}, back=_added("<|endoftext|>")),
    "gpt-neox": Family(  # BOS is named and not added
        {
            "tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False,
            "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
        },
        front=_added("<|endoftext|>", "<|padding|>"),
        back=_added(*(" " * n for n in range(8, 4, -1)), special=False, normalized=True),
        normalizer=normalizers.NFC(),
    ),
    "llama2": _sentencepiece(_LLAMA_CONFIG),
    "mistral-v0.3": _sentencepiece(
        {**_LLAMA_CONFIG, "legacy": False},
        front=(*_SENTENCEPIECE, *_added("[INST]", "[/INST]")),
        normalizer=None,
        pre_tokenizer=pre_tokenizers.Metaspace("▁", "first", split=False),
        dummy="first",
    ),
    "phi3": _sentencepiece(  # tokens that swallow the white space behind them
        {**_LLAMA_CONFIG, "add_bos_token": False, "eos_token": "<|endoftext|>", "legacy": False},
        front=(*_added("<unk>", "<s>"), *_added("</s>", special=False, rstrip=True)),
        back=(*_added("<|endoftext|>"), *_added("<|assistant|>", "<|system|>", "<|end|>", "<|user|>", rstrip=True)),
        bos=None,
    ),
    "llama3": Family(
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>", "clean_up_tokenization_spaces": True,
        },
        back=_added("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        pre_tokenizer=_pieces(LLAMA3),
        ignore_merges=True,
        bos="<|begin_of_text|>",
    ),
    "qwen2": Family(
        {
            "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "add_prefix_space": False,
            "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
            "unk_token": None,
        },
        back=(
            *_added("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            *_added("<tool_call>", "</tool_call>", special=False),
        ),
        normalizer=normalizers.NFC(),
        pre_tokenizer=_pieces(QWEN2),
    ),
    "gemma2": _sentencepiece(
        {
            "tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False,
            "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
        },
        front=(
            *_added("<pad>", "<eos>", "<bos>", "<unk>"),
            *_added("<mask>", "<unused0>", special=False),
            *_added("<start_of_turn>", "<end_of_turn>"),
        ),
        back=_added("\n\n\n", "\n\n\n\n", "<table>", special=False),
        normalizer=_MARK,
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        decoder=decoders.Sequence(_UNMARK),
        bos="<bos>",
        dummy="",
    ),
}  # fmt: skip
