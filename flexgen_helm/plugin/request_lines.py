"""What HELM asks of a model, as lines of JSON that can be compared, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace

from helm.benchmark.adaptation.request_state import RequestState
from helm.common.general import asdict_without_nones

# What of a request state is not known before it is answered.
ANSWER = ("result", "annotations")


def request_lines(states: Iterable[RequestState]) -> Iterator[str]:
    """Yield each request with its instance and references as JSON, as HELM's file has it before it
    is answered.
    """
    for state in states:
        without = asdict_without_nones(replace(state, **dict.fromkeys(ANSWER)))  # type: ignore[arg-type]
        yield json.dumps(without, sort_keys=True)


def digest_of(lines: Iterable[str]) -> str:
    """Return a digest of requests, as `request_lines` yields them."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
