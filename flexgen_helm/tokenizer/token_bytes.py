"""What each token of a vocabulary contributes to running text, as bytes, and HELM's spelling of
bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from flexgen_helm.errors import UnsupportedArchitectureError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPACE_MARK = "\u2581"  # sentencepiece writes a space as this lower one eighth block
_HELM_BYTES = re.compile(r"bytes:(\\x[0-9a-f]{2})+")
# Types of steps that join tokens to text; of Replace one alone is known (`vocabulary_kind`).
_DECODERS = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Strip")
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def helm_text(data: bytes) -> str:
    r"""Return `data` as text if it is whole UTF-8, else in HELM's spelling, e.g. `bytes:\xe2\x82`
    (backslashes).
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def helm_bytes(text: str) -> bytes:
    """Invert `helm_text`."""
    spelt = _HELM_BYTES.fullmatch(text)
    return (
        bytes.fromhex(text.removeprefix("bytes:").replace("\\x", ""))
        if spelt
        else text.encode("utf-8")
    )


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each of the 256 bytes, as {character: byte}.

    Printable Latin-1 stands for itself; the 68 others, in ascending order, are the characters from
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = sorted(set(range(256)).difference(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(unprintable)}


def token_byte_table(backend: Backend) -> list[bytes]:
    """Return the bytes of every token, indexed by id; ids that the vocabulary skips are empty.

    Raises `UnsupportedArchitectureError` as `vocabulary_kind` does.
    """
    kind = vocabulary_kind(backend)
    alphabet = byte_alphabet()
    added = backend.get_added_tokens_decoder()
    pieces = backend.get_vocab(with_added_tokens=False)
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (1 + max(vocab.values(), default=-1))
    for piece, token_id in vocab.items():
        token = added.get(token_id)
        if token and (
            kind == "byte-level" or token.special or not (token.normalized or piece in pieces)
        ):
            table[token_id] = piece.encode("utf-8")  # it is found in a text as it is written
        elif kind != "byte-level":
            byte = _BYTE_PIECE.fullmatch(piece) if kind == "byte fallback" else None
            table[token_id] = (
                bytes([int(byte[1], 16)])
                if byte
                else piece.replace(SPACE_MARK, " ").encode("utf-8")
            )
        elif all(char in alphabet for char in piece):
            table[token_id] = bytes(alphabet[char] for char in piece)
        else:  # a control token that is not registered as added
            table[token_id] = piece.encode("utf-8")
    return table


def vocabulary_kind(backend: Backend) -> Literal["byte-level", "sentencepiece", "byte fallback"]:
    """Return how tokens determine bytes; byte fallback is sentencepiece with tokens such as <0x0A>.

    Raises `UnsupportedArchitectureError` where they do not: WordPiece, for one, leaves spaces out.
    """
    state = json.loads(backend.to_str())
    model, decoder = state["model"], list(_flatten(state["decoder"]))
    steps = decoder or list(_flatten(state["pre_tokenizer"]))
    kinds = {step["type"] for step in steps}
    unmark_spaces = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    unknown = [
        name for name in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(name)
    ]
    unknown += [
        step["type"] for step in decoder if step != unmark_spaces and step["type"] not in _DECODERS
    ]
    unknown += [
        repr(step["replacement"])
        for step in steps
        if step.get("replacement", SPACE_MARK) != SPACE_MARK
    ]
    if not unknown and "ByteLevel" in kinds:
        return "byte-level"
    if not unknown and (kinds & {"Metaspace", "ByteFallback"} or unmark_spaces in decoder):
        return (
            "byte fallback"
            if model.get("byte_fallback") or "ByteFallback" in kinds
            else "sentencepiece"
        )
    raise UnsupportedArchitectureError(
        f"the tokenizer decodes with {', '.join(unknown or sorted(kinds)) or 'nothing'}; known are "
        "byte-level BPE (ByteLevel) and sentencepiece-like vocabularies (Metaspace, ByteFallback)"
    )


def _flatten(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the leaves of a serialized decoder or pre-tokenizer, whose sequences may nest."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for inner in step.get("decoders") or step.get("pretokenizers") or ():
            yield from _flatten(inner)
    else:
        yield step
