"""Which experts staging memory holds, and which one gives its slot to the next. No threads, no tensors.

A pass visits the layers in a cycle, so the least recently used expert is the one that is needed next: with fewer slots
than a pass has experts, dropping it finds nothing again. The least frequently used is dropped instead, and of equals
the newest. So hot experts stay, and with even routing whatever came first does.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Uses for each known expert after which all counts are halved, so that what was hot once does not stay for ever.
_HALF_LIFE = 8


class ExpertCache(Generic[Key]):
    """Slots, and how often each expert was used."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[Key, int] = {}  # from the oldest to the newest
        self._free = [*range(num_slots - 1, -1, -1)]
        self._uses: dict[Key, float] = {}
        self._uses_left = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def slot(self, key: Key) -> int:
        return self._slots[key]

    def uses(self, key: Key) -> float:
        """Return how often an expert was used, old uses counted less."""
        return self._uses.get(key, 0.0)

    def note_use(self, key: Key) -> None:
        if not self._uses_left:
            self._uses = {known: count / 2 for known, count in self._uses.items()}
            self._uses_left = _HALF_LIFE * max(1, len(self._uses))
        self._uses_left -= 1
        self._uses[key] = self.uses(key) + 1

    def victim(self, keep: Container[Key], prefers: Callable[[Key], bool] = lambda key: False) -> Key | None:
        """Return the expert whose slot is worth least; None if all are in `keep`.

        prefers: those that are dropped last.
        """
        newest_first = [key for key in reversed(self._slots) if key not in keep]
        return min(newest_first, key=lambda key: (prefers(key), self.uses(key)), default=None)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    def put(self, key: Key) -> int:
        """Give an expert a free slot."""
        assert key not in self._slots
        self._slots[key] = self._free.pop()
        return self._slots[key]

    def drop(self, key: Key) -> None:
        self._free.append(self._slots.pop(key))
