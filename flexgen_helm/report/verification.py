"""Answers that are computed again to check others: how they are compared, what a sample says, and bundles of them."""

from __future__ import annotations

import hashlib
import json
import math
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from flexgen_helm.errors import FlexgenError, RequestError, UsageError
from flexgen_helm.files import naming, size
from flexgen_helm.request import Cost, GenerationRequest, GenerationResult
from flexgen_helm.response_cache import decode_result, encode_result

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
class Recorded:
    """Answers that some may be drawn from.

    path: the file that has them. command: what wrote it. record: what it says of the run.
    read: returns an item for each answer. to_answer: makes an answer of an item, in whatever form the caller wants.
    """

    path: Path
    command: str
    record: Mapping[str, Any]
    read: Callable[[], Sequence[Any]]
    to_answer: Callable[[Any], Any]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise `UsageError` where the file is damaged."""
        try:
            yield
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = " ".join(str(error).split())[:200]
            raise UsageError(f"{self.path} cannot be read ({why}); make the run again") from None


@dataclass(frozen=True)
class BundledAnswer:
    """The requests of an answer in token ids, and their results (`plain_result`).

    source: index of the run in `Manifest.sources`.
    """

    source: int
    name: str
    requests: Sequence[GenerationRequest]
    results: Sequence[Any]


@dataclass(frozen=True)
class Manifest:
    """What a sample was drawn from.

    population: answers of the suite or file. sha256: of a bundle's lines.
    """

    suite: str
    population: int
    seed: int
    sources: list[Source]
    format: Literal[1] = 1
    sha256: str = ""


def draw(
    recorded: Sequence[Recorded], sample: str | None, seed: int
) -> tuple[list[Source], list[tuple[int, Any]], int]:
    """Draw answers at random, without replacement; sample: as of `sample_size`.

    Returns the runs of which some were drawn; their index with each answer, in order; and of how many they were drawn.
    Raises `UsageError` for a file that is damaged or has no record of its run, and where nothing was answered.
    """
    counts = []
    for part in recorded:
        with part.reading():
            counts.append(len(part.read()))
    if not (population := sum(counts)):
        raise UsageError("there is no answer of a flexgen model to check; make the run to its end first")
    numbers = np.random.default_rng(seed).choice(population, sample_size(sample, population), replace=False)
    sources: list[Source] = []
    drawn = []
    for part, end, length in zip(recorded, np.cumsum(counts), counts):
        if len(of_part := np.sort(numbers[(numbers >= end - length) & (numbers < end)])):
            known = {field.name: part.record.get(field.name) for field in fields(Source)}
            if not known["fingerprint"]:
                raise UsageError(
                    f"{part.path} has no record of the model that answered; make it again with flexgen-helm "
                    f"{part.command}, which computes only what is not stored"
                )
            with part.reading():
                items = part.read()
                drawn += [(len(sources), part.to_answer(items[number])) for number in of_part - end + length]
                sources.append(TypeAdapter(Source).validate_python(known))
    return sources, drawn, population


def compare(
    recorded: Any, computed: Any, tolerance: float, has_sums: bool = False
) -> tuple[list[tuple[str, Any, Any]], float]:
    """Return what differs of two values of JSON (where it is, and both), and the largest difference of two numbers.

    has_sums: differences are parts of the recorded number where that is above 1.
    """
    differences, largest = [], 0.0
    for where, old, new in _unequal(recorded, computed, ""):
        difference = math.nan
        if isinstance(old, float) and isinstance(new, float):
            difference = abs(old - new) / (max(1.0, abs(old)) if has_sums else 1.0)
        largest = max(largest, difference)
        if not difference <= tolerance:
            differences.append((where, old, new))
    return differences, largest


def _unequal(recorded: Any, computed: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(recorded, dict) and isinstance(computed, dict):
        for key in dict.fromkeys([*recorded, *computed]):
            yield from _unequal(recorded.get(key), computed.get(key), f"{where}.{key}")
    elif isinstance(recorded, list) and isinstance(computed, list | tuple) and len(recorded) == len(computed):
        for index, (old, new) in enumerate(zip(recorded, computed)):
            yield from _unequal(old, new, f"{where}[{index}]")
    elif recorded != computed:
        yield where.removeprefix("."), recorded, computed


def plain_result(result: GenerationResult) -> Any:
    """Return a successful result as values of JSON, without what it cost."""
    return json.loads(encode_result(replace(result, cost=Cost())))


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


def write_bundle(path: Path, manifest: Manifest, drawn: Sequence[BundledAnswer]) -> None:
    """Write a bundle. Raises `FlexgenError` for one that would be too large to read."""
    import zstandard

    lines = "".join(json.dumps(answer, default=vars, allow_nan=False) + "\n" for answer in drawn).encode()
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


def read_bundle(path: Path) -> tuple[Manifest, list[BundledAnswer]]:
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
        drawn = [TypeAdapter(BundledAnswer).validate_json(line, strict=True) for line in lines.splitlines()]
        for answer in drawn:
            for request in answer.requests:
                request.validate()
            for result in answer.results:
                decode_result(json.dumps(result))
            is_known = 0 <= answer.source < len(manifest.sources)
            if not is_known or not 0 < len(answer.requests) == len(answer.results) or manifest.population < len(drawn):
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
