"""A suite that must end by a time: its instances in a random order, in blocks that are predicted to
end before it.

A sample is named by its share: of each run entry it has the first instances of a random order, that
share of them. A block takes the sample from one share to a larger one, so it is like all other
blocks but for its size, and its seconds follow from theirs. How long it takes is predicted before
it begins, and what has begun is finished, so its instances do not decide whether they count. They
do decide how large the next block is.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

# Of the random order of instances.
SEED = 0
# Ratio of neighbouring shares at which a sample may end.
_STEP = 1.1
# Shares at which a suite is looked at that ends when its pairs are decided.
LOOKS = [2.0**-halvings for halvings in range(5, -1, -1)]
# A block may be so many times as large as the last one that was measured.
_GROWTH = 8
# A block begins if so many times its predicted seconds are left, and more after a small one:
# answers differ in length.
_CAUTION = 1.25
# Least seconds of a further request, in means of the last block: two measured blocks say little of
# a larger one.
_LEAST_SLOPE = 0.3


def joining_shares(
    entry: str, instances: Iterable[tuple[str, str | None]], seed: int = SEED
) -> dict[str, float]:
    """Return id -> joining share: a sample of the entry with a larger share has the instance.

    That of the first instance is 0. Instances are ordered by digests, so in the same way for every
    model.

    instances: id and split of each. Splits are drawn apart, because HELM scores one of them.
    """
    splits: dict[str | None, list[str]] = {}
    for key, split in dict.fromkeys(instances):
        splits.setdefault(split, []).append(key)
    joining = {}
    for keys in splits.values():
        keys.sort(key=lambda key: hashlib.sha256(f"{seed} {entry} {key}".encode()).digest())
        joining.update({key: rank / len(keys) for rank, key in enumerate(keys)})
    return joining


def possible_shares(most_instances: int) -> list[float]:
    """Return the shares at which a sample may end, from one instance of each entry to all."""
    steps = math.ceil(math.log(most_instances) / math.log(_STEP))
    return [_STEP ** (step - steps) for step in range(steps + 1)]


def largest_sample(
    requests: Iterable[float], shares: Sequence[float], left_s: Callable[[], float],
    compute: Callable[[float, float], float | None], one_by_one: bool = False,
) -> float:  # fmt: skip
    """Compute blocks while one more is predicted to end in time; return the share of the sample.

    It is 0 where no block ended.

    requests: the joining share of each.
    shares: those at which the sample may end, ascending.
    left_s: returns the seconds that are left.
    compute: computes the requests from one share to another; returns its seconds, None if most
        answers were stored. Raises `TimeoutError` if the time is up before the first block ends;
        later ones are finished.
    one_by_one: a block ends at the next share, not at the largest one that is possible.
    """
    ordered, measured, joined = sorted(requests), list[tuple[int, float]](), 0.0
    while larger := [share for share in shares if share > joined]:
        candidates = larger[:1] if one_by_one else larger
        block_sizes = [
            bisect_left(ordered, share) - bisect_left(ordered, joined) for share in candidates
        ]
        index = largest_block(block_sizes, measured, left_s())
        if index is None:
            break
        try:
            seconds = compute(joined, larger[index])
        except TimeoutError:
            break
        joined = larger[index]
        if seconds is not None:
            measured.append((block_sizes[index], seconds))
    return joined


def largest_block(
    block_sizes: Sequence[int], measured: Sequence[tuple[int, float]], left_s: float
) -> int | None:
    """Return the index of the largest block that is predicted to end in time; None if none is.

    block_sizes: requests of each possible block, ascending.
    measured: requests and seconds of earlier blocks; without any, it is the smallest block.
    """
    if left_s <= 0:
        return None
    if not measured:
        return 0
    requests, seconds = measured[-1]
    slope = seconds / requests
    # A block has seconds beside those of requests, for reading weights; the first one has more, for
    # what is compiled.
    if len(measured) > 2 and (more := requests - measured[-2][0]):
        slope = min(slope, max((seconds - measured[-2][1]) / more, _LEAST_SLOPE * slope))
    caution = _CAUTION + requests**-0.5
    fits = [
        index
        for index, size in enumerate(block_sizes)
        if size <= max(_GROWTH * requests, block_sizes[0])
        and caution * (seconds + slope * (size - requests)) <= left_s
    ]
    return max(fits, default=None)
