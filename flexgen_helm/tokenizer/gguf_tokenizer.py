"""The tokenizer that a GGUF file's metadata describes, rebuilt as a `tokenizers.Tokenizer`.

`tokenizer.ggml.model` names the algorithm, `tokenizer.ggml.pre` the way text is split before it.
The rebuild in `transformers` ignores the latter. SmolLM2 was trained with every digit split off:
without that its `  1` and ` ½` come out in other pieces, often with the same number of tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from gguf import Keys, TokenType
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from flexgen_helm.checkpoint.gguf_header import read_gguf_header
from flexgen_helm.concurrency import stop_point
from flexgen_helm.errors import CheckpointError, FlexgenError, UnsupportedArchitectureError
from flexgen_helm.tokenizer.token_bytes import SPACE_MARK

# Keys whose tokens end a completion beside EOS, as in llama.cpp.
_END_ID_KEYS = (
    Keys.Tokenizer.EOT_ID,
    Keys.Tokenizer.EOM_ID,
    Keys.Tokenizer.FIM_PAD_ID,
    Keys.Tokenizer.FIM_REP_ID,
    Keys.Tokenizer.FIM_SEP_ID,
)
_ID_KEYS = (Keys.Tokenizer.BOS_ID, Keys.Tokenizer.UNK_ID, Keys.Tokenizer.EOS_ID, *_END_ID_KEYS)
# The types of the values that are read here; a file may store a value of any type under any key.
_VALUE_TYPES: Mapping[str, type] = {
    **dict.fromkeys(
        (Keys.Tokenizer.MODEL, Keys.Tokenizer.PRE, Keys.Tokenizer.CHAT_TEMPLATE, Keys.General.NAME),
        str,
    ),
    **dict.fromkeys((Keys.Tokenizer.LIST, Keys.Tokenizer.TOKEN_TYPE, Keys.Tokenizer.MERGES), list),
    Keys.Tokenizer.SCORES: list,
    **dict.fromkeys(_ID_KEYS, int),
    **dict.fromkeys((Keys.Tokenizer.ADD_BOS, Keys.Tokenizer.ADD_PREFIX), bool),
}
# Keys that change nothing here, whatever they hold: tokens of encoders and of infilling, other
# forms of the tokenizer, and EOS behind a text, which no answer may follow.
IRRELEVANT = (
    "tokenizer.chat_templates",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.cls_token_id",
    "tokenizer.ggml.fim_mid_token_id",
    "tokenizer.ggml.fim_pre_token_id",
    "tokenizer.ggml.fim_suf_token_id",
    "tokenizer.ggml.mask_token_id",
    "tokenizer.ggml.middle_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.prefix_token_id",
    "tokenizer.ggml.seperator_token_id",
    "tokenizer.ggml.suffix_token_id",
    "tokenizer.ggml.token_type_count",
    "tokenizer.huggingface.json",
    "tokenizer.rwkv.world",
)
# Values that change nothing, of keys that are not read.
NEUTRAL: Mapping[str, Any] = {
    Keys.Tokenizer.ADD_PREFIX: False,  # sentencepiece alone reads it
    "tokenizer.ggml.add_sep_token": False,
    "tokenizer.ggml.normalizer.lowercase": False,
    "tokenizer.ggml.normalizer.strip_accents": False,
    "tokenizer.ggml.precompiled_charsmap": [],
    "tokenizer.ggml.remove_extra_whitespaces": False,
    "tokenizer.ggml.suppress_tokens": [],
}
# What llama.cpp takes for sentencepiece's tokens where the file does not say.
_LLAMA_IDS = {Keys.Tokenizer.BOS_ID: 1, Keys.Tokenizer.EOS_ID: 2, Keys.Tokenizer.UNK_ID: 0}
# The text is cut at tokens of these types before anything else.
_CUT_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
# Every split of a piece is tried, which takes the square of its length. Published pieces have a few
# hundred characters.
_MAX_PIECE = 4096

# Texts of tokens that end a turn or a text, whatever else the metadata name: as in llama.cpp,
# without those of families that are not read, and without </s> and <eos>, which are names of HTML
# in some vocabularies.
_END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
)
# Of Phi-3's special tokens these alone do not take the white space behind them; no key tells of
# that.
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def read_gguf_tokenizer(path: Path) -> dict[str, Any] | None:
    """Build the tokenizer of a GGUF file, as the arguments of `Tokenizer`; None if the file has no
    vocabulary.

    Raises `CheckpointError` for a damaged file, `UnsupportedArchitectureError` for a vocabulary
    type or a pre-tokenizer without a rule here: guessing would change token ids and so every score.
    """
    metadata = _read_metadata(path)
    model = metadata.get(Keys.Tokenizer.MODEL)
    if model is None or not metadata.get(Keys.Tokenizer.LIST):
        return None
    if model == "llama":
        metadata = {**_LLAMA_IDS, **metadata}
    tokens: list[str] = metadata[Keys.Tokenizer.LIST]
    types: list[int] = metadata.get(Keys.Tokenizer.TOKEN_TYPE) or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{path} has {len(tokens)} tokens but {len(types)} token types")
    if not all(isinstance(token, str) and len(token) <= _MAX_PIECE for token in tokens):
        raise CheckpointError(
            f"{path} has a token that is no text of at most {_MAX_PIECE:,} characters"
        )
    if len(set(tokens) - {""}) + tokens.count("") != len(tokens):
        raise CheckpointError(f"{path} has two tokens of the same text; use another conversion")
    for key in _ID_KEYS:
        if not 0 <= metadata.get(key, 0) < len(tokens):
            raise CheckpointError(
                f"{path} has {key} = {metadata[key]}, outside its {len(tokens)} tokens"
            )
    backend = _backend(path, metadata, tokens, model)
    # Files are called "Phi-3 mini", "Phi3", and by the converter "Phi 3.5 Mini Instruct".
    # Fine-tunes have names of their own.
    title, architecture = metadata.get(Keys.General.NAME, ""), metadata.get("general.architecture")
    is_phi3 = bool(re.search(r"(?i)phi[-_ ]?3", title)) or (model, architecture) == (
        "llama",
        "phi3",
    )
    added_tokens: dict[int, list[AddedToken]] = {kind: [] for kind in _CUT_TYPES}
    for token, token_type in zip(tokens, types):
        kind = TokenType.CONTROL if token in _END_TOKENS else token_type
        strips, special = is_phi3 and token not in _KEEP_SPACE, kind != TokenType.USER_DEFINED
        if kind in added_tokens:
            added_tokens[kind].append(
                AddedToken(token, special=special, normalized=False, rstrip=strips)
            )
    for added in added_tokens.values():  # in the order of `_CUT_TYPES`
        backend.add_tokens(added)
    end_ids = [i for i, token in enumerate(tokens) if token in _END_TOKENS]
    end_ids += [metadata[key] for key in _END_ID_KEYS if key in metadata]
    return {
        "backend": backend,
        "bos_id": metadata.get(Keys.Tokenizer.BOS_ID),
        "eos_id": metadata.get(Keys.Tokenizer.EOS_ID),
        "eos_ids": end_ids,
        "chat_template": metadata.get(Keys.Tokenizer.CHAT_TEMPLATE),
    }


def _read_metadata(path: Path) -> Mapping[str, Any]:
    """Read a file's metadata.

    Raises as `read_gguf_tokenizer` for a value of another type than its key has, and for an
    algorithm or a key that nothing here reads.
    """
    metadata = read_gguf_header(path).metadata
    for key, expected in _VALUE_TYPES.items():
        if key in metadata and type(metadata[key]) is not expected:
            raise CheckpointError(
                f"{path} has {key} as {type(metadata[key]).__name__}, not as {expected.__name__}"
            )
    model = metadata.get(Keys.Tokenizer.MODEL)
    if model is None or not metadata.get(Keys.Tokenizer.LIST):
        return metadata
    if model not in _ALGORITHMS:
        raise UnsupportedArchitectureError(
            f"{path} has a vocabulary of type {model!r}; known are {', '.join(sorted(_ALGORITHMS))}"
        )
    accepted = {*_VALUE_TYPES, *IRRELEVANT} - (
        {Keys.Tokenizer.ADD_PREFIX} if model == "gpt2" else set()
    )
    for key, value in metadata.items():
        if not key.startswith("tokenizer.") or key.startswith(f"{Keys.Tokenizer.CHAT_TEMPLATE}."):
            continue  # templates with a name are for tools
        if key not in accepted and value != NEUTRAL.get(key):
            raise UnsupportedArchitectureError(
                f"{path} has {key} = {str(value)[:40]}, which nothing here reads for a vocabulary "
                f"of type {model!r} and may change token ids; use the model's safetensors folder "
                "or another conversion"
            )
    return metadata


def _backend(path: Path, metadata: Mapping[str, Any], tokens: list[str], model: str) -> Backend:
    """Build the algorithm. Raises `CheckpointError` for a vocabulary that does not fit together."""
    # Where the file does not say, as in llama.cpp: texts of sentencepiece and Llama 3 vocabularies
    # begin with BOS.
    adds_bos = model == "llama" or metadata.get(Keys.Tokenizer.PRE) in _LLAMA3_AND_TEKKEN
    try:
        backend = _ALGORITHMS[model](metadata, tokens)
        if metadata.get(Keys.Tokenizer.ADD_BOS, adds_bos):
            bos = metadata[Keys.Tokenizer.BOS_ID]
            backend.post_processor = processors.TemplateProcessing(
                single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
            )
        return backend
    except FlexgenError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}; use another conversion") from error
    # the library raises plain Exception, e.g. for a merge of tokens not in the vocabulary
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} has a vocabulary that does not fit together: {reason}"
        ) from error


# ---- byte-level BPE ("gpt2") ----

# The pattern that came with GPT-4; vocabularies differ in how many digits stay together.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT4 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = _GPT4.replace("{1,3}", "")
# That of GPT-4o divides words before capital letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = _TEKKEN.replace("|", rf"{_CONTRACTIONS}?|", 2).replace(r"\p{N}|", r"\p{N}{1,3}|")
_LLAMA3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 midm-2.0 pixtral"
# A word that is a token is not merged; where the file does not say, BOS comes first.
_LLAMA3_AND_TEKKEN = f"{_LLAMA3} tekken".split()
_QWEN = "qwen2 deepseek-r1-qwen"
_WITH_NFC = f"{_QWEN} qwen35".split()  # texts are normalized before they are split


def _splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns
    ]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


_GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_SINGLE_DIGITS_SPLIT = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), _GPT2_SPLIT]
)
# By `tokenizer.ggml.pre`.
_PRE_TOKENIZERS: dict[str, pre_tokenizers.PreTokenizer] = {
    name: split
    for names, split in (
        ("gpt2 gpt-2 phi-2 olmo exaone4 granite-docling", _GPT2_SPLIT),
        ("smollm starcoder refact command-r exaone", _SINGLE_DIGITS_SPLIT),
        (f"{_LLAMA3} dbrx smaug-bpe glm4 chatglm-bpe", _splits(_GPT4)),
        (f"{_QWEN} hunyuan solar-open grok-2", _splits(_DIGIT)),
        (
            "qwen35",  # marks belong to words
            _splits(
                _DIGIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
            ),
        ),
        ("seed-coder", _splits(_DIGIT.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"))),
        ("tekken", _splits(_TEKKEN)),
        ("gpt-4o llama4 minimax-m2", _splits(_GPT4O)),
        ("deepseek-v3 hunyuan-dense", _splits(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK)),
    )
    for name in names.split()
}


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    pre = metadata.get(Keys.Tokenizer.PRE)
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedArchitectureError(
            f"the GGUF file has {pre!r} as {Keys.Tokenizer.PRE}, the rule that splits text; known "
            f"are {', '.join(sorted(_PRE_TOKENIZERS))}. If you know the model's, write it into a "
            "copy: python -m gguf.scripts.gguf_new_metadata --pre-tokenizer RULE FILE COPY"
        )
    merges = _split_merges(metadata.get(Keys.Tokenizer.MERGES, ()))
    # A whole word of these vocabularies is one token, whether or not merges lead to it.
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_AND_TEKKEN))
    if pre in _WITH_NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = cast(Any, _PRE_TOKENIZERS[pre])
    backend.decoder = decoders.ByteLevel()
    return backend


# ---- sentencepiece BPE ("llama") ----


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = metadata.get(Keys.Tokenizer.MERGES)
    types = metadata.get(Keys.Tokenizer.TOKEN_TYPE, ())
    cut = {token for token, kind in zip(tokens, types) if kind in _CUT_TYPES}
    longest_run = 0
    if merges:
        pairs = _split_merges(merges)
    else:
        pairs, longest_run = _merges_from_scores(vocab, metadata[Keys.Tokenizer.SCORES], cut)
    unknown = tokens[metadata.get(Keys.Tokenizer.UNK_ID, 0)]
    backend = Backend(
        BPE(vocab=vocab, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    if longest_run:
        longest = Regex(f"{SPACE_MARK}{{{longest_run}}}(?={SPACE_MARK})")
        backend.pre_tokenizer = cast(Any, pre_tokenizers.Split(longest, behavior="isolated"))
    mark = normalizers.Replace(" ", SPACE_MARK)
    unmark = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(Keys.Tokenizer.ADD_PREFIX, True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark])
        backend.decoder = decoders.Sequence([*unmark, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = mark
        backend.decoder = decoders.Sequence(unmark)
    return backend


def _merges_from_scores(
    vocab: dict[str, int], scores: Sequence[float], cut: set[str]
) -> tuple[list[tuple[str, str]], int]:
    """Return the merges: every split of a piece into two pieces, best score of the piece first, as
    sentencepiece merges.

    Of pieces of the same score the leftmost is merged, which no order of merges expresses. In Llama
    2's vocabulary all runs of spaces, and they alone, have one score: then a run is cut into
    longest ones from the left, and the length of these is returned too, else 0.

    cut: tokens that are cut out of a text before merging, so that their scores do not matter.

    Raises `CheckpointError` for other pieces of the same score.
    """
    ranked = []
    for piece, i in vocab.items():
        stop_point()
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        ranked += [
            (-scores[i], vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab
        ]
    ranked.sort()
    formed = [(score, a + b) for score, *_, a, b in ranked if a + b not in cut]
    runs = {piece for piece in vocab.keys() - cut if piece and not piece.strip(SPACE_MARK)}
    # Runs of 1 to n spaces, all of one score, and spaces within no other piece.
    if (
        len(runs) < 3
        or len(runs) != max(map(len, runs))
        or len({scores[vocab[run]] for run in runs - {SPACE_MARK}}) > 1
        or any(SPACE_MARK in piece[1:] for piece in vocab.keys() - cut - runs)
    ):
        runs = set()
    for (score, piece), (next_score, next_piece) in pairwise(formed):
        if score == next_score and piece != next_piece and not runs.issuperset((piece, next_piece)):
            raise CheckpointError(
                f"the GGUF file gives {piece!r} and {next_piece!r} the same score, so the order of "
                "merges is not known; use the model's safetensors folder or another conversion"
            )
    return [(a, b) for *_, a, b in ranked], len(runs)


_ALGORITHMS: dict[str, Callable[[Mapping[str, Any], list[str]], Backend]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}


# ---- both ----


def _split_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Split 'a b' into ('a', 'b'), which the library wants."""
    return [cast("tuple[str, str]", tuple(merge.split(" ", 1))) for merge in merges]
