"""Recorded answers that are checked: how they are drawn and compared, and what a sample says."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter

from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.request import Cost, GenerationResult
from flexgen_helm.response_cache import encode_result
from flexgen_helm.system_errors import system_error

T = TypeVar("T")
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Source:
    """The run that answers are from, as `flexgen_run.json` describes it."""

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
    """What a comparison of scores found, in sentences.

    differences: what is not as recorded.
    unchecked: what could not be compared, and why.
    """

    differences: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def not_checked(self, what: str, why: object) -> None:
        self.unchecked.append(f"{what} ({one_line(why)})")


class RecordedAnswer(NamedTuple):
    """An answer in a file, of one request or several.

    name: no two answers of a file have the same.
    recorded: what is compared, as values of JSON.
    recompute: called with a service and a model; returns what to compare with `recorded`.
    has_sums: numbers of `recorded` are sums of log-probabilities.
    number: among the answers of all files.
    source: index of its file.
    """

    name: str
    recorded: Any
    recompute: Callable[..., Any]
    has_sums: bool = False
    number: int = 0
    source: int = 0


class AnswerFile(NamedTuple):
    """A file with recorded answers.

    command: of `flexgen-helm`, that wrote the file.
    record: of the run, with the fields of `Source`.
    read: returns the answers.
    check_scores: called with the model as it is here; compares the file's scores with those of its
        answers. None without scores.
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


class Drawn(NamedTuple):
    """Answers that were drawn, in order.

    sources: the runs of all files.
    population: number of answers in all files.
    """

    sources: list[Source]
    answers: list[RecordedAnswer]
    population: int


def draw(recorded: Sequence[AnswerFile], sample: str | None, seed: int) -> Drawn:
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
            hardware, batch_invariant = known[source.fingerprint]
            sources[index] = replace(source, hardware=hardware, batch_invariant=batch_invariant)
    return Drawn(sources, drawn, len(answers))


def drawn_numbers(seed: int, population: int, size: int) -> list[int]:
    """Return the numbers that a seed draws, in order."""
    import numpy as np

    return sorted(np.random.default_rng(seed).choice(population, size, replace=False).tolist())


def _source(part: AnswerFile) -> Source:
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
    """Return where two values of JSON differ, with both values, and the largest difference of two
    numbers.

    tolerance: of numbers.
    has_sums: a difference is relative to the recorded number where that is above 1.
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
    """Return one sentence on the first difference of two values, or none; parameters: as of
    `compare_answers`.
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
    """Yield path and value of each leaf of a value of JSON; an empty list is a leaf."""
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
