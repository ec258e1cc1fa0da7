"""The known names that a misspelt one may mean, and lists of names in sentences."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

# Similarity of two names, between 0 and 1, below which a suggestion is noise.
_MIN_SIMILARITY = 0.7


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return at most `count` known names that `name` may mean, best first.

    These are the first of the following that there are:
    - names that differ only in case and punctuation: 'llama3-8B' is 'llama-3-8b'
    - names that `name` shortens, as a whole or word by word: 'smollm2', '8b-instruct', 'qwen-8b'
    - similar names, first those with the same words: 'llama-3-7b' may be 'llama-3-70b' or
      'llama-2-7b'
    """
    wanted, words = _letters(name), _words(name)
    if not wanted:
        return []
    equal, longer, similar = [], [], []
    for candidate in dict.fromkeys(known):
        letters, candidate_words = _letters(candidate), _words(candidate)
        likeness = difflib.SequenceMatcher(None, letters, wanted).ratio()
        rank = (-likeness - len(words & candidate_words) / len(words), candidate)
        if letters == wanted:
            equal.append(rank)
        elif letters.startswith(wanted) or all(
            any(candidate_word.startswith(word) for candidate_word in candidate_words)
            for word in words
        ):
            longer.append(rank)
        elif likeness >= _MIN_SIMILARITY:
            similar.append(rank)
    return [candidate for _, candidate in sorted(equal or longer or similar)[:count]]


def question(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return 'did you mean a or b? '; `otherwise` where no known name is close."""
    close = closest(name, known)
    return f"did you mean {listed(close)}? " if close else otherwise


def listed(names: Iterable[str]) -> str:
    """Return 'a', 'a or b', or 'a, b or c'."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9.]+", name.lower()))
