"""Answers that are computed again to check a suite: how they are compared, what a sample says, and bundles of them."""

from __future__ import annotations

import hashlib
import json
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

from flexgen_helm.errors import FlexgenError, RequestError, UsageError
from flexgen_helm.files import naming, size
from flexgen_helm.request import GenerationRequest, GenerationResult, ThinkingFormat
from flexgen_helm.tokenizer.thinking import split_thinking
from flexgen_helm.tokenizer.tokenizer import Tokenizer

CONFIDENCE = 0.95
_FORMAT = 1
_MANIFEST, _LINES = "manifest.json", "answers.jsonl"
_LIMITS = {_MANIFEST: 1 << 20, _LINES: 1 << 28}
# What JSON must be: a type, a mapping or a list of such, or (something,) that may be null.
_REQUEST = {
    "prompt_token_ids": [int], "max_tokens": int, "temperature": float, "top_p": float, "seed": int, "stop": [str],
    "n": int, "echo_logprobs": bool, "thinking": ({"begins_inside": bool, "budget": (int,), "end_ids": [int]},),
}  # fmt: skip
_ANSWER = {"text": str, "thinking": (str,), "end": (str,), "tokens": [str], "logprobs": [float]}
_LINE = {"source": int, "name": str, "echoed": int, "request": _REQUEST, "answers": [_ANSWER]}
_SOURCE = {
    "model": str, "precision": str, "fingerprint": str, "origin": (str,), "hardware": (dict,), "versions": (dict,),
    "generation_config": (dict,), "chat_template": (dict,), "batch_invariant": ([str],),
}  # fmt: skip
_CONTENT = {"suite": str, "population": int, "drawn": int, "seed": int, "sources": [_SOURCE], "sha256": str}
SOURCE_KEYS = tuple(_SOURCE)


@dataclass(frozen=True)
class DrawnAnswer:
    """A recorded answer, and the request in token ids that it is computed from.

    source: index of the record of the run.
    echoed: tokens of the prompt's end that the answers begin with, with log-probabilities.
    answers: as `answers_of` makes them.
    """

    source: int
    name: str
    echoed: int
    request: GenerationRequest
    answers: Sequence[Mapping[str, Any]]


def answers_of(drawn: DrawnAnswer, result: GenerationResult, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return computed answers as they are compared: text, thinking, end, tokens, logprobs."""
    start = len(result.prompt_token_ids) - drawn.echoed
    ids, scores = result.prompt_token_ids[start:], (result.prompt_logprobs or ())[start:]
    found = []
    for completion in result.completions:
        thinking = None
        if drawn.request.thinking is not None:
            thinking, completion = split_thinking(completion, drawn.request.thinking.begins_inside)
        found.append({
            "text": completion.text,
            "thinking": thinking,
            "end": completion.finish_reason,
            "tokens": [*tokenizer.token_texts(ids), *completion.tokens],
            "logprobs": [float(score or 0.0) for score in (*scores, *completion.logprobs)],
        })  # fmt: skip
    return found


def is_equal(
    recorded: Sequence[Mapping[str, Any]], computed: Sequence[Mapping[str, Any]], tolerance: float
) -> tuple[bool, float]:
    """Return whether answers are equal, and the largest difference of a log-probability."""
    pairs = [pair for answers in zip(recorded, computed) for pair in zip(*(answer["logprobs"] for answer in answers))]
    largest = max((abs(old - new) for old, new in pairs), default=0.0)
    old, new = ([{**answer, "logprobs": len(answer["logprobs"])} for answer in found] for found in (recorded, computed))
    return bool(old) and old == new and all(abs(a - b) <= tolerance for a, b in pairs), largest


def sample_size(asked: str | None, population: int) -> int:
    """Return how many answers to draw; asked: '1%' or a number. Raises `UsageError`."""
    text = asked or "1%"
    try:
        is_share = text.endswith("%")
        number = float(text[:-1]) / 100 * population if is_share else int(text)
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf) or (is_share and number > population):
        raise UsageError(f"--sample is {text!r}; it must be a share such as 1% or a number such as 200")
    return min(population, max(math.ceil(number - 1e-9), 1 if asked else 20))


def upper_bound(differing: int, drawn: int, population: int) -> float:
    """Return the share that differs at most, with 95 % confidence (Clopper-Pearson); exact where all were drawn."""
    if drawn in (population, differing):
        return differing / drawn
    from scipy.special import betaincinv

    return float(betaincinv(differing + 1, drawn - differing, CONFIDENCE))


def share_above(share: float) -> str:
    """Return a share in percent, rounded up to two digits."""
    return f"{Context(2, ROUND_CEILING).create_decimal(100 * share):f} %"


# Bundles: a tar file with two members, compressed by Zstandard.


def write_bundle(path: Path, manifest: Mapping[str, Any], drawn: Sequence[DrawnAnswer]) -> None:
    """Write a bundle; manifest: without what follows from the answers. Raises `FlexgenError` if that cannot be done."""
    import zstandard

    content = list(map(asdict, drawn))
    for line in content:
        line["request"] = {name: line["request"][name] for name in _REQUEST}
    lines = "".join(json.dumps(line) + "\n" for line in content).encode()
    manifest = {"format": _FORMAT, **manifest, "drawn": len(drawn), "sha256": hashlib.sha256(lines).hexdigest()}
    members = {_MANIFEST: json.dumps(manifest, indent=2).encode(), _LINES: lines}
    packed = b""
    for name, data in members.items():
        if len(data) > _LIMITS[name]:
            raise FlexgenError(f"{name} would have {size(len(data))}, and a bundle's has {size(_LIMITS[name])} at most")
        packed += _header(name, len(data)) + data + bytes(-len(data) % 512)
    with naming(path):
        path.write_bytes(zstandard.compress(packed + bytes(1024)))


def _header(name: str, length: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = length
    return member.tobuf(tarfile.USTAR_FORMAT)


def read_bundle(path: Path) -> tuple[dict[str, Any], list[DrawnAnswer]]:
    """Return the manifest and the answers of a bundle. Raises `UsageError` for what `write_bundle` does not write.

    Nothing is unpacked to the disk, and no more is decompressed than a bundle may have.
    """
    import zstandard

    try:
        with path.open("rb") as file:
            reader = zstandard.ZstdDecompressor().stream_reader(file)
            content, lines = (_read_member(reader, name) for name in _LIMITS)
            if reader.read(1025) != bytes(1024):
                raise ValueError("it goes on behind its two members")
        manifest = json.loads(content)
        if isinstance(manifest, dict) and manifest.pop("format", None) != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}, which this version of flexgen-helm reads")
        _require(manifest, _CONTENT, _MANIFEST)
        if hashlib.sha256(lines).hexdigest() != manifest["sha256"]:
            raise ValueError(f"the SHA-256 of {_LINES} is not that of {_MANIFEST}")
        drawn = [_read_line(line, number, manifest) for number, line in enumerate(lines.splitlines(), 1)]
        if not 0 < len(drawn) == manifest["drawn"] <= manifest["population"]:
            raise ValueError(f"it has {len(drawn):,} answers, and its manifest says {manifest['drawn']:,}")
        return manifest, drawn
    except (OSError, ValueError, RecursionError, RequestError, zstandard.ZstdError) as error:
        raise UsageError(f"{path} is no bundle as verify writes it: {str(error) or type(error).__name__}") from None


def _read_member(reader: Any, name: str) -> bytes:
    header = reader.read(512)
    length = int(header[124:135] or b"0", 8)
    if header != _header(name, length):
        raise ValueError(f"where {name} should be, a regular file, it has {header[:100].rstrip(bytes(1))!r}")
    if length > _LIMITS[name]:
        raise ValueError(f"{name} has {size(length)}, and {size(_LIMITS[name])} are read at most")
    content: bytes = reader.read(length + -length % 512)
    if len(content) < length:
        raise ValueError(f"{name} ends after {size(len(content))} of {size(length)}")
    return content[:length]


def _read_line(text: bytes, number: int, manifest: Mapping[str, Any]) -> DrawnAnswer:
    line = json.loads(text)
    _require(line, _LINE, f"line {number}")
    request, thinking = line["request"], line["request"]["thinking"]
    if thinking is not None:
        request["thinking"] = ThinkingFormat(**{**thinking, "end_ids": tuple(thinking["end_ids"])})
    drawn = DrawnAnswer(**{**line, "request": GenerationRequest(**request)})
    drawn.request.validate()
    is_whole = all(len(answer["tokens"]) == len(answer["logprobs"]) for answer in drawn.answers)
    if not (
        is_whole
        and 0 <= drawn.source < len(manifest["sources"])
        and 0 <= drawn.echoed <= len(request["prompt_token_ids"])
    ):
        raise ValueError(f"line {number} contradicts itself")
    return drawn


def _require(value: Any, shape: Any, name: str) -> None:
    """Raise ValueError with the name of what is not of the shape."""
    if isinstance(shape, tuple):
        if value is not None:
            _require(value, shape[0], name)
        return
    kind: Any = shape if isinstance(shape, type) else type(shape)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{name} is {repr(value)[:60]}, no {kind.__name__}")
    if isinstance(shape, list):
        for item in value:
            _require(item, shape[0], name)
    elif isinstance(shape, dict):
        if set(value) != set(shape):
            raise ValueError(f"{name} has the keys {repr(sorted(value))[:200]}, not {sorted(shape)}")
        for key, part in shape.items():
            _require(value[key], part, f"{key} of {name}")
