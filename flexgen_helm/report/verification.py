"""Answers that are computed again to check a suite: how they are compared, what a sample says, and bundles of them."""

from __future__ import annotations

import hashlib
import json
import math
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any, Literal

from pydantic import FiniteFloat, TypeAdapter

from flexgen_helm.errors import FlexgenError, RequestError, UsageError
from flexgen_helm.files import naming, size
from flexgen_helm.request import GenerationRequest, GenerationResult
from flexgen_helm.tokenizer.thinking import split_thinking
from flexgen_helm.tokenizer.tokenizer import Tokenizer

CONFIDENCE = 0.95
_MANIFEST, _LINES = "manifest.json", "answers.jsonl"
_LIMITS = {_MANIFEST: 1 << 20, _LINES: 1 << 28}


@dataclass(frozen=True)
class Source:
    """What is recorded of a run, as `flexgen_run.json` has it."""

    model: str
    precision: str
    fingerprint: str
    origin: str | None
    hardware: dict[str, Any] | None
    versions: dict[str, Any] | None
    generation_config: dict[str, Any] | None
    chat_template: dict[str, Any] | None
    batch_invariant: list[str] | None = None


@dataclass(frozen=True)
class Answer:
    """A completion, of which thinking is apart.

    end: why it ended. tokens: texts, as HELM spells them. logprob: their sum, only if another one is recorded.
    """

    text: str
    thinking: str | None
    end: str | None
    tokens: list[str]
    logprobs: list[FiniteFloat]
    logprob: float | None = None


@dataclass(frozen=True)
class DrawnAnswer:
    """Recorded answers, and the request in token ids that they are computed from.

    source: index of the run in `Manifest.sources`.
    echoed: tokens of the prompt's end with which an answer's tokens begin.
    """

    source: int
    name: str
    echoed: int
    request: GenerationRequest
    answers: list[Answer]


@dataclass(frozen=True)
class Manifest:
    """What a sample was drawn from.

    population: answers of the suite. sha256: of a bundle's lines.
    """

    suite: str
    population: int
    seed: int
    sources: list[Source]
    format: Literal[1] = 1
    sha256: str = ""


def answers_of(drawn: DrawnAnswer, result: GenerationResult, tokenizer: Tokenizer) -> list[Answer]:
    """Return the completions of a result in the form of HELM's file."""
    start = len(result.prompt_token_ids) - drawn.echoed
    texts = tokenizer.token_texts(result.prompt_token_ids[start:])
    scores = [score or 0.0 for score in (result.prompt_logprobs or ())[start:]]
    found = []
    for answer in result.completions:
        thinking = None
        if drawn.request.thinking is not None:
            thinking, answer = split_thinking(answer, drawn.request.thinking.begins_inside)
        tokens, logprobs = [*texts, *answer.tokens], [*scores, *answer.logprobs]
        found.append(Answer(answer.text, thinking, answer.finish_reason, tokens, logprobs))
    return found


def is_equal(recorded: Sequence[Answer], computed: Sequence[Answer], tolerance: float) -> tuple[bool, float]:
    """Return whether answers are equal, and the largest difference of a log-probability."""
    pairs = [pair for old, new in zip(recorded, computed) for pair in zip(old.logprobs, new.logprobs)]
    largest = max((abs(old - new) for old, new in pairs), default=0.0)
    old, new = ([(len(one.logprobs), replace(one, logprobs=[])) for one in found] for found in (recorded, computed))
    return bool(old) and old == new and all(abs(a - b) <= tolerance for a, b in pairs), largest


def sample_size(asked: str | None, population: int) -> int:
    """Return how many answers to draw; asked: '1%' or a number. Raises `UsageError`."""
    text = asked or "1%"
    with suppress(ValueError):
        is_share = text.endswith("%")
        number = float(text[:-1]) / 100 * population if is_share else int(text)
        if 0 < number < math.inf and (number <= population or not is_share):
            return min(population, max(math.ceil(number - 1e-9), 1 if asked else 20))
    raise UsageError(f"--sample is {text!r}; it must be a share such as 1% or a number such as 200")


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


def write_bundle(path: Path, manifest: Manifest, drawn: Sequence[DrawnAnswer]) -> None:
    """Write a bundle. Raises `FlexgenError` for one that would be too large to read."""
    import zstandard

    lines = "".join(json.dumps(asdict(answer)) + "\n" for answer in drawn).encode()
    manifest = replace(manifest, sha256=hashlib.sha256(lines).hexdigest())
    packed = b""
    for name, data in ((_MANIFEST, json.dumps(asdict(manifest), indent=2).encode()), (_LINES, lines)):
        if len(data) > _LIMITS[name]:
            raise FlexgenError(f"{name} would have {size(len(data))}, and a bundle's has {size(_LIMITS[name])} at most")
        packed += _header(name, len(data)) + data + bytes(-len(data) % 512)
    with naming(path):
        path.write_bytes(zstandard.compress(packed + bytes(1024)))


def _header(name: str, length: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = length
    return member.tobuf(tarfile.USTAR_FORMAT)


def read_bundle(path: Path) -> tuple[Manifest, list[DrawnAnswer]]:
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
        manifest = TypeAdapter(Manifest).validate_json(content, strict=True)
        drawn = [TypeAdapter(DrawnAnswer).validate_json(line, strict=True) for line in lines.splitlines()]
        for answer in drawn:
            answer.request.validate()
            prompt, is_short = answer.request.prompt_token_ids, manifest.population < len(drawn)
            wrong = any(len(one.tokens) != len(one.logprobs) for one in answer.answers)
            is_known = 0 <= answer.source < len(manifest.sources)
            if wrong or is_short or not is_known or not 0 <= answer.echoed <= len(prompt or ()):
                raise ValueError(f"{answer.name[:60]!r} contradicts itself or {_MANIFEST}")
        if hashlib.sha256(lines).hexdigest() != manifest.sha256 or not drawn:
            raise ValueError(f"the SHA-256 of {_LINES} is not that of {_MANIFEST}")
        return manifest, drawn
    except (OSError, ValueError, RequestError, zstandard.ZstdError) as error:
        why = " ".join(str(error).split())[:300]
        raise UsageError(f"{path} is no bundle as verify writes it: {why or type(error).__name__}") from None


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
