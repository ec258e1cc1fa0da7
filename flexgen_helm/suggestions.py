"""The known names that a misspelt one may mean. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Least similarity of two names, of 1: below it a suggestion is noise.
_SIMILAR = 0.7


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names that `name` may mean, best first.

    Names that differ only in case and punctuation: 'llama3-8B' is 'llama-3-8b'.
    Else names that `name` shortens, as a whole or word by word: 'smollm2', '8b-instruct', 'qwen-8b'.
    Else similar ones, first those with the same words: 'llama-3-7b' may be 'llama-3-70b' or 'llama-2-7b'.
    """
    wanted, words = _letters(name), _words(name)
    if not wanted:
        return []
    equal, longer, similar = [], [], []
    for candidate in dict.fromkeys(known):
        letters, others = _letters(candidate), _words(candidate)
        likeness = difflib.SequenceMatcher(None, letters, wanted).ratio()
        rank = (-likeness - len(words & others) / len(words), candidate)
        if letters == wanted:
            equal.append(rank)
        elif letters.startswith(wanted) or all(any(other.startswith(word) for other in others) for word in words):
            longer.append(rank)
        elif likeness >= _SIMILAR:
            similar.append(rank)
    return [candidate for _, candidate in sorted(equal or longer or similar)[:count]]


def question(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return 'did you mean a or b? '; `otherwise` where no known name is close."""
    close = closest(name, known)
    return f"did you mean {listed(close)}? " if close else otherwise


def listed(names: Iterable[str]) -> str:
    """Return 'a', 'a or b', or 'a, b or c'."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", name.lower()))
