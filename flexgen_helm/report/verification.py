"""Answers that are computed again to check others: how they are compared, what a sample says, and
bundles of them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import TypeAdapter

from flexgen_helm.errors import FlexgenError, RequestError, UsageError
from flexgen_helm.files import size
from flexgen_helm.request import Cost, GenerationRequest, GenerationResult
from flexgen_helm.response_cache import decode_result, encode_result
from flexgen_helm.system_errors import system_error

T = TypeVar("T")
CONFIDENCE = 0.95
_LIMIT = 1 << 28


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


@dataclass
class ScoreCheck:
    """What a comparison of scores found: sentences on what differs, and on what could not be
    compared.
    """

    differences: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def not_checked(self, what: str, why: object) -> None:
        self.unchecked.append(f"{what} ({one_line(why)})")


class RecordedAnswer(NamedTuple):
    """An answer in a file, of one request or several.

    name: no two answers of a file have the same.
    recorded: what is compared, as values of JSON. has_sums: its numbers are sums of
        log-probabilities.
    recompute: returns the same as a service answers for a model; is given both.
    number: among all answers. source: index of its run.
    """

    name: str
    recorded: Any
    recompute: Callable[..., Any]
    has_sums: bool = False
    number: int = 0
    source: int = 0


class Recorded(NamedTuple):
    """Answers that some may be drawn from.

    path: the file that has them. command: what wrote it. record: what it says of the run.
    check_scores: compares its scores with those of its answers, for the model as it is here; None
        without scores.
    """

    path: Path
    command: str
    record: Mapping[str, Any]
    read: Callable[[], Sequence[RecordedAnswer]]
    check_scores: Callable[..., ScoreCheck] | None = None

    def reading(self, read: Callable[[], T]) -> T:
        """Return what `read` reads of the files. Raises `FlexgenError` where one is damaged."""
        try:
            return read()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            if system_error(error):
                raise
            again = f"make it again with flexgen-helm {self.command}"
            raise FlexgenError(f"{self.path} cannot be read ({one_line(error)}); {again}") from None


@dataclass(frozen=True)
class BundledAnswer:
    """The requests of an answer in token ids, and their results (`plain_result`).

    source: index of the run in `SampleManifest.sources`. number: among all answers of the suite or
        file.
    """

    source: int
    number: int
    name: str
    requests: Sequence[GenerationRequest]
    results: Sequence[Any]


@dataclass(frozen=True)
class SampleManifest:
    """What a sample was drawn from.

    population: answers of the suite or file.
    """

    suite: str
    population: int
    seed: int
    sources: list[Source]
    format: Literal[2] = 2


class Drawn(NamedTuple):
    """Answers that were drawn, in order; sources: the runs; population: of how many answers."""

    sources: list[Source]
    answers: list[RecordedAnswer]
    population: int


def draw(recorded: Sequence[Recorded], sample: str | None, seed: int) -> Drawn:
    """Draw answers at random, without replacement; sample: as of `sample_size`.

    Raises `FlexgenError` for a file that is damaged, has an answer twice or no record of its run,
    and `UsageError` where nothing was answered.
    """
    answers = [
        answer._replace(source=index)
        for index, part in enumerate(recorded)
        for answer in part.reading(part.read)
    ]
    counts = Counter(answer.name for answer in answers)
    if twice := [name for name, times in counts.items() if times > 1]:
        raise FlexgenError(f"{len(twice):,} answers are there more than once: {short(twice[0])}")
    if not answers:
        raise UsageError(
            "there is no answer of a flexgen model to check; make the run to its end first"
        )
    numbers = drawn_numbers(seed, len(answers), sample_size(sample, len(answers)))
    drawn = [answers[number]._replace(number=number) for number in numbers]
    sources = [*map(_source, recorded)]
    # A run whose answers were all stored says nothing of the machine; its fingerprint is that of a
    # run that does.
    known = {
        source.fingerprint: (source.hardware, source.batch_invariant)
        for source in sources
        if source.hardware
    }
    for index, source in enumerate(sources):
        if source.hardware is None and source.fingerprint in known:
            hardware, bits = known[source.fingerprint]
            sources[index] = replace(source, hardware=hardware, batch_invariant=bits)
    return Drawn(sources, drawn, len(answers))


def drawn_numbers(seed: int, population: int, size: int) -> list[int]:
    """Return the numbers that a seed draws, in order."""
    import numpy as np

    return sorted(np.random.default_rng(seed).choice(population, size, replace=False).tolist())


def _source(part: Recorded) -> Source:
    values = {field.name: part.record.get(field.name) for field in fields(Source)}
    try:
        return TypeAdapter(Source).validate_python(values)
    except ValueError:
        raise FlexgenError(
            f"{part.path} has no record of the model that answered; make it again with "
            f"flexgen-helm {part.command}, which computes only what is not stored"
        ) from None


def compare_answers(
    recorded: Any, computed: Any, tolerance: float, has_sums: bool = False
) -> tuple[list[tuple[str, Any, Any]], float]:
    """Return what differs of two values of JSON (where it is, and both), and the largest difference
    of two numbers.

    has_sums: differences are parts of the recorded number where that is above 1.
    """
    differences, largest = [], 0.0
    before, after = dict(leaves(recorded)), dict(leaves(computed))
    for where in before | after:
        old, new, difference = before.get(where), after.get(where), math.nan
        if old == new:
            continue
        if isinstance(old, float) and isinstance(new, float):
            difference = abs(old - new) / (max(1.0, abs(old)) if has_sums else 1.0)
        largest = max(largest, difference)
        if not difference <= tolerance:
            differences.append((where.removeprefix("."), old, new))
    return differences, largest


def disagreements(name: str, recorded: Any, again: Any, tolerance: float = 0.0) -> list[str]:
    """Return a sentence on a part in which what is recorded is not what was made again, if there is
    one.
    """
    differences = compare_answers(recorded, again, tolerance, has_sums=True)[0]
    if not differences:
        return []
    # Of statistics the mean is the score.
    where, old, new = min(differences, key=lambda part: not part[0].endswith(".mean"))
    more = f" ({len(differences) - 1:,} more values differ)" if len(differences) > 1 else ""
    return [f"{name}: {where} is {short(old)} in the file, and {short(new)} made again{more}"]


def one_line(value: object) -> str:
    """Return the beginning of a text of several lines."""
    return " ".join(str(value).split())[:200] or type(value).__name__


def short(value: object, most: int = 90) -> str:
    """Return the beginning of a value, without what a terminal obeys."""
    shown = "nothing" if value is None else repr(value)
    return shown if len(shown) <= most else f"{shown[:most]}…"


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield where in a value of JSON something is that has no parts, and what; an empty list is
    such.
    """
    if isinstance(value, list | tuple) and value:
        for index, part in enumerate(value):
            yield from leaves(part, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{where}.{key}")
    else:
        yield where, value


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
    """Return the share that differs at most, with 95 % confidence (Clopper-Pearson); exact where
    all were drawn.
    """
    if drawn in (population, differing):
        return differing / drawn
    from scipy.special import betaincinv

    return float(betaincinv(differing + 1, drawn - differing, CONFIDENCE))


def share_above(share: float) -> str:
    """Return a share in percent, rounded up to two digits."""
    return f"{Context(2, ROUND_CEILING).create_decimal(100 * share):f} %"


# Bundles: lines of JSON, the manifest first, compressed by Zstandard.


def packed_bundle(manifest: SampleManifest, drawn: Sequence[BundledAnswer]) -> bytes:
    """Return the content of a bundle. Raises `FlexgenError` for one that would be too large to
    read.
    """
    import zstandard

    lines = (json.dumps(record, default=vars, allow_nan=False) for record in (manifest, *drawn))
    content = "\n".join(lines).encode()
    if len(content) > _LIMIT:
        raise FlexgenError(
            f"the bundle would have {size(len(content))}, and may have {size(_LIMIT)} at most"
        )
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def read_bundle(path: Path) -> tuple[SampleManifest, list[BundledAnswer]]:
    """Return the manifest and the answers of a bundle. Raises `FlexgenError` for what
    `packed_bundle` does not make.

    Nothing is written to the disk, and no more is decompressed than a bundle may have.
    """
    import zstandard

    packed = path.read_bytes()
    try:
        if not 0 < zstandard.frame_content_size(packed) <= _LIMIT:
            raise ValueError(f"it says nothing of its size, or has more than {size(_LIMIT)}")
        frame = zstandard.ZstdDecompressor().decompressobj()
        # No more than it says; a frame that is cut has less.
        content, _ = zstandard.ZstdDecompressor().decompress(packed), frame.decompress(packed)
        if frame.unused_data:
            raise ValueError(f"{len(frame.unused_data):,} bytes lie behind its end")
        first, *lines = content.split(b"\n")
        manifest = TypeAdapter(SampleManifest).validate_json(first, strict=True)
        drawn = [TypeAdapter(BundledAnswer).validate_json(line, strict=True) for line in lines]
        for answer in drawn:
            for request in answer.requests:
                request.validate()
            for result in answer.results:
                decode_result(json.dumps(result))
            is_known = 0 <= answer.source < len(manifest.sources)
            if not is_known or not 0 < len(answer.requests) == len(answer.results):
                raise ValueError(f"{answer.name[:60]!r} contradicts itself or the first line")
        if not manifest.suite.isprintable():
            raise ValueError(f"no suite is named {short(manifest.suite)}")
        if [answer.number for answer in drawn] != drawn_numbers(
            manifest.seed, manifest.population, len(drawn)
        ):
            raise ValueError(
                f"its {len(drawn):,} answers are not those that seed {manifest.seed} draws of "
                f"{manifest.population:,}"
            )
        return manifest, drawn
    except (ValueError, RequestError, zstandard.ZstdError) as error:
        hint = (
            "; answers of flexgen-helm batch need --requests, and of lm-eval the file is "
            "results_….json"
        )
        hint = "" if packed.startswith(zstandard.FRAME_HEADER) else hint
        raise FlexgenError(
            f"{path} is no bundle as verify writes it: {one_line(error)}{hint}"
        ) from None
