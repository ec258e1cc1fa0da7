"""Encode each prompt once, though a harness looks at its tokens several times."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from flexgen_helm.tokenizer.chat import missing_bos

if TYPE_CHECKING:
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

# The ids take about as many bytes: four per token, and a token is about four characters.
MAX_CACHED_CHARACTERS = 32 * 2**20


class PromptEncoder:
    """Token ids of texts without special tokens; the most recently used texts stay cached.

    Under HELM the window check, the submitted block, the client and the token counts share it, in both passes of
    `flexgen-helm run`. Safe to use from many threads.
    """

    def __init__(self, tokenizer: Tokenizer, max_characters: int = MAX_CACHED_CHARACTERS) -> None:
        self.tokenizer = tokenizer
        self._max_characters = max_characters
        self._num_characters = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of `text`. Raises `RequestError` for a text that is not valid Unicode."""
        with self._lock:
            if (ids := self._ids.get(text)) is not None:
                self._ids.move_to_end(text)
                return tuple(ids)
        ids = array("i", self.tokenizer.encode(text, add_special_tokens=False))
        with self._lock:
            if text not in self._ids:
                self._ids[text] = ids
                self._num_characters += len(text)
            while self._num_characters > self._max_characters:
                evicted, _ = self._ids.popitem(last=False)
                self._num_characters -= len(evicted)
        return tuple(ids)

    def context_tokens(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return BOS if the model was trained with one and a prompt with these ids has none, else nothing."""
        return missing_bos(self.tokenizer, ids)
