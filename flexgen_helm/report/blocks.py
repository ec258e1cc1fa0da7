"""How the records of two blocks of one engine (`Engine.last_run`) become one. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import add
from typing import Any

# How numbers (or dictionaries of numbers) of two blocks are joined.
_JOINS: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("bytes", "time_s", "wall_s", "halvings", "preemptions", "roofline_s"), add),
    **dict.fromkeys(("peak_bytes", "peak_workspace_bytes"), max),
}
_PREDICTIONS = ("predicted_latency_s", "predicted")


def add_blocks(before: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """Join what an engine said of two blocks: sums and peaks; policy, placement and hardware are the newer block's.

    A prediction is a sum too, and None if one of the blocks has none.
    """
    joined = {**before, **block}
    for name in _JOINS.keys() & before.keys() & block.keys():
        joined[name] = _merge(before[name], block[name], _JOINS[name])
    if "bytes" in before:  # else `before` has no block
        for name in set(_PREDICTIONS) & set(joined):
            both = before.get(name), block.get(name)
            joined[name] = None if None in both else _merge(*both, add)
    return joined


def _merge(old: Any, new: Any, join: Any) -> Any:
    """Join two numbers, or the numbers of two dictionaries by key."""
    if isinstance(old, Mapping):
        both = {name: _merge(old[name], value, join) for name, value in new.items() if name in old}
        return {**old, **new, **both}
    return join(old, new)
