"""Answers that are computed again to check others: how they are compared, what a sample says, and bundles of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from flexgen_helm.errors import FlexgenError, RequestError, UsageError
from flexgen_helm.files import naming, size
from flexgen_helm.request import Cost, GenerationRequest, GenerationResult
from flexgen_helm.response_cache import decode_result, encode_result

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


class RecordedAnswer(NamedTuple):
    """An answer in a file, of one request or several.

    recorded: what is compared, as values of JSON. has_sums: its numbers are sums of log-probabilities.
    recompute: returns the same as a service answers for a model, which it is given.
    """

    name: str
    recorded: Any
    recompute: Callable[..., Any]
    has_sums: bool = False


class Recorded(NamedTuple):
    """Answers that some may be drawn from.

    path: the file that has them. command: what wrote it. record: what it says of the run.
    """

    path: Path
    command: str
    record: Mapping[str, Any]
    read: Callable[[], Sequence[RecordedAnswer]]

    def answers(self) -> Sequence[RecordedAnswer]:
        """Raises `UsageError` where the file is damaged."""
        try:
            return self.read()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = " ".join(str(error).split())[:200]
            again = f"make it again with flexgen-helm {self.command}"
            raise UsageError(f"{self.path} cannot be read ({why}); {again}") from None


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

    population: answers of the suite or file.
    """

    suite: str
    population: int
    seed: int
    sources: list[Source]
    format: Literal[1] = 1


def draw(
    recorded: Sequence[Recorded], sample: str | None, seed: int
) -> tuple[list[Source], list[tuple[int, RecordedAnswer]], int]:
    """Draw answers at random, without replacement; sample: as of `sample_size`.

    Returns the runs of which some were drawn; their index with each answer, in order; and of how many they were drawn.
    Raises `UsageError` for a file that is damaged or has no record of its run, and where nothing was answered.
    """
    import numpy as np

    answers = [(part, answer) for part in recorded for answer in part.answers()]
    if not answers:
        raise UsageError("there is no answer of a flexgen model to check; make the run to its end first")
    numbers = np.random.default_rng(seed).choice(len(answers), sample_size(sample, len(answers)), replace=False)
    sources: list[Source] = []
    drawn, last = [], None
    for part, answer in (answers[number] for number in np.sort(numbers)):
        if part is not last:
            last, known = part, {field.name: part.record.get(field.name) for field in fields(Source)}
            try:
                sources.append(TypeAdapter(Source).validate_python(known))
            except ValueError:
                raise UsageError(
                    f"{part.path} has no record of the model that answered; make it again with flexgen-helm "
                    f"{part.command}, which computes only what is not stored"
                ) from None
        drawn.append((len(sources) - 1, answer))
    return sources, drawn, len(answers)


def compare(
    recorded: Any, computed: Any, tolerance: float, has_sums: bool = False
) -> tuple[list[tuple[str, Any, Any]], float]:
    """Return what differs of two values of JSON (where it is, and both), and the largest difference of two numbers.

    has_sums: differences are parts of the recorded number where that is above 1.
    """
    differences, largest = [], 0.0
    before, after = dict(_leaves(recorded)), dict(_leaves(computed))
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


def _leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield where in a value of JSON something is that has no parts, and what; an empty list is such."""
    if isinstance(value, list | tuple) and value:
        for index, part in enumerate(value):
            yield from _leaves(part, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{where}.{key}")
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
    """Return the share that differs at most, with 95 % confidence (Clopper-Pearson); exact where all were drawn."""
    if drawn in (population, differing):
        return differing / drawn
    from scipy.special import betaincinv

    return float(betaincinv(differing + 1, drawn - differing, CONFIDENCE))


def share_above(share: float) -> str:
    """Return a share in percent, rounded up to two digits."""
    return f"{Context(2, ROUND_CEILING).create_decimal(100 * share):f} %"


# Bundles: lines of JSON, the manifest first, compressed by Zstandard.


def write_bundle(path: Path, manifest: Manifest, drawn: Sequence[BundledAnswer]) -> None:
    """Write a bundle. Raises `FlexgenError` for one that would be too large to read."""
    import zstandard

    lines = (json.dumps(record, default=vars, allow_nan=False) for record in (manifest, *drawn))
    content = "\n".join(lines).encode()
    if len(content) > _LIMIT:
        raise FlexgenError(f"{path} would have {size(len(content))}, and a bundle has {size(_LIMIT)} at most")
    with naming(path):
        path.write_bytes(zstandard.compress(content))


def read_bundle(path: Path) -> tuple[Manifest, list[BundledAnswer]]:
    """Return the manifest and the answers of a bundle. Raises `UsageError` for what `write_bundle` does not write.

    Nothing is written to the disk, and no more is decompressed than a bundle may have.
    """
    import zstandard

    try:
        with path.open("rb") as file:
            content = zstandard.ZstdDecompressor().stream_reader(file).read(_LIMIT + 1)
        if len(content) > _LIMIT:
            raise ValueError(f"it has more than {size(_LIMIT)}")
        first, *lines = content.split(b"\n")
        manifest = TypeAdapter(Manifest).validate_json(first, strict=True)
        drawn = [TypeAdapter(BundledAnswer).validate_json(line, strict=True) for line in lines]
        for answer in drawn:
            for request in answer.requests:
                request.validate()
            for result in answer.results:
                decode_result(json.dumps(result))
            is_known = 0 <= answer.source < len(manifest.sources)
            if not is_known or not 0 < len(answer.requests) == len(answer.results) or manifest.population < len(drawn):
                raise ValueError(f"{answer.name[:60]!r} contradicts itself or the first line")
        return manifest, drawn
    except (OSError, ValueError, RequestError, zstandard.ZstdError) as error:
        why = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{path} is no bundle as verify writes it: {why or type(error).__name__}; answers of flexgen-helm batch "
            "need --requests, and of lm-eval the file is results_….json"
        ) from None
