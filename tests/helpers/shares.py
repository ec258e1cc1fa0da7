"""The slow suite tries a fixed part of the largest matrices; `make test-all`, which sets TEST_ALL,
tries them whole.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from importlib.metadata import version
from typing import TypeVar

import pytest

from tests.helpers.paths import ROOT

Case = TypeVar("Case")
IS_WHOLE = bool(os.environ.get("TEST_ALL"))
# Mark of a test that only `make test-all` runs.
only_whole = pytest.mark.skipif(not IS_WHOLE, reason="make test-all runs it")


def share(cases: Iterable[Case], of: int, seed: str = "") -> list[Case]:
    """One in `of` cases, the same ones in every run and in their order; another seed, others."""
    known = list(cases)
    if IS_WHOLE or len(known) <= 1:
        return known
    chosen = random.Random(f"{seed}{len(known)}").sample(range(len(known)), -(-len(known) // of))
    return [known[number] for number in sorted(chosen)]


def share_of_release(cases: Iterable[Case], of: int) -> list[Case]:
    """All cases with the locked release of `transformers`; with each other release one in `of`,
    others for each.
    """
    release = version("transformers")
    return list(cases) if release == locked("transformers") else share(cases, of, seed=release)


def locked(package: str) -> str:
    """The version in `constraints.txt`."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.split("==")[1].split()[0] for line in lines if line.startswith(f"{package}=="))


def share_of(count: int, of: int) -> int:
    """One in `of` of so many examples."""
    return count if IS_WHOLE else -(-count // of)
