"""Stop strings and text of one running completion, over bytes, so that no character is torn between
tokens.

    matcher = StopMatcher(tokenizer.token_bytes, request.stop)      # one per completion
    for token_id in sampled:                                        # without EOS
        if matcher.push(token_id):
            break                                                   # finish_reason "stop"
    result = matcher.result()                                       # text, tokens, token_ids

UTF-8 synchronizes itself: the bytes of a stop string occur exactly where the decoded text has its
characters. So the search runs on bytes and never decodes twice. There is one exception, on purpose:
a U+FFFD that stands for malformed bytes does not match a stop string that contains U+FFFD.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexgen_helm.errors import RequestError
from flexgen_helm.tokenizer.thinking import ThinkingTracker
from flexgen_helm.tokenizer.token_bytes import helm_text


@dataclass(frozen=True)
class CompletionText:
    r"""A completion up to its stop string. Filled by `StopMatcher.result`.

    tokens, token_ids: parallel. If every token is whole UTF-8, `tokens` join to `text`; other
        tokens are spelled `bytes:\xNN`, as HELM wants them, while `text` shows the character that
        they form together.
    """

    text: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]


class StopMatcher:
    """Collects one completion token by token and says when a stop string has appeared in its text.

    The text ends where the earliest stop string starts. A push searches the new bytes and the few
    before them that a stop string could reach back to, so a completion costs time linear in its
    length.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stops: Sequence[str] = (),
        thinking: ThinkingTracker | None = None,
    ) -> None:
        """token_bytes: maps an id to the bytes it contributes. stops: non-empty strings, possibly
        none.

        thinking: of a model that thinks; stop strings then count in its answer only.

        Raises `RequestError` for an empty stop string and for one that is not valid Unicode.
        """
        self._token_bytes = token_bytes
        self._stops = [_encoded(stop) for stop in stops]
        self._reach = max(map(len, self._stops), default=1) - 1
        self._data = bytearray()
        self._starts: list[int] = []  # byte offset at which each token begins
        self._token_ids: list[int] = []
        self._thinking = thinking
        self._cut: int | None = None  # byte offset at which the stop string begins

    def push(self, token_id: int) -> bool:
        """Append a token; return True if the text now contains a stop string.

        Raises `RuntimeError` after that: the completion is over and takes no more tokens.
        """
        if self._cut is not None:
            raise RuntimeError("this completion has met its stop string; no token may follow")
        #     ... reach | new token       a match must end in the new token, so it begins at most
        #         [----stop----]          `reach` = longest stop - 1 bytes before it
        begin = len(self._data)
        self._starts.append(begin)
        self._token_ids.append(token_id)
        self._data += self._token_bytes(token_id)
        first = max(0, begin - self._reach)
        if (tracker := self._thinking) is not None:
            was_answer = tracker.answer_start is not None
            tracker.push(self._data)
            if tracker.answer_start is None:
                return False
            # The token with which the answer begins may have shown that earlier ones belong to it.
            first = max(first, tracker.answer_start) if was_answer else tracker.answer_start
        return self._search(first)

    def finish(self) -> bool:
        """Search what was put off in a completion that has ended; return True if it contains a stop
        string.
        """
        if self._thinking is None or self._thinking.answer_start is not None:
            return False
        self._thinking.finish()
        return self._thinking.answer_start is not None and self._search(self._thinking.answer_start)

    def _search(self, first: int) -> bool:
        matches = (self._data.find(stop, first) for stop in self._stops)
        self._cut = min((match for match in matches if match >= 0), default=None)
        return self._cut is not None

    def result(self) -> CompletionText:
        """Return the text so far without its stop string; may be called at any time, and changes
        nothing.

        The token that the stop string cuts in two stays with its text trimmed; tokens that begin at
        or after the start of the stop string are dropped. A character that the last token leaves
        incomplete becomes U+FFFD.
        """
        end = len(self._data) if self._cut is None else self._cut
        num_tokens = len(self._starts) if self._cut is None else bisect_left(self._starts, end)
        borders = [*self._starts[:num_tokens], end]
        return CompletionText(
            text=self._data[:end].decode("utf-8", errors="replace"),
            tokens=tuple(
                helm_text(bytes(self._data[start:stop])) for start, stop in pairwise(borders)
            ),
            token_ids=tuple(self._token_ids[:num_tokens]),
        )


def _encoded(stop: str) -> bytes:
    if not stop:
        raise RequestError("every stop string must be a non-empty string")
    try:
        return stop.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the stop string {stop!r} is not valid Unicode") from error
