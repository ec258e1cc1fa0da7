"""Stop strings and text of one running completion, over bytes, so that no character is torn between tokens.

    matcher = StopMatcher(tokenizer.token_bytes, request.stop)      # one per completion
    for token_id in sampled:                                        # the executor keeps EOS to itself
        if matcher.push(token_id):
            break                                                   # finish_reason "stop"
    kept = matcher.result()                                         # text, tokens, token_ids

UTF-8 synchronises itself: the bytes of a stop string are found exactly where the decoded text has its characters.
The search therefore runs on bytes and never decodes twice. (The one exception is deliberate: a U+FFFD that stands
for malformed bytes does not match a stop string that contains U+FFFD.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexgen_helm.errors import RequestError
from flexgen_helm.tokenizer.token_bytes import helm_text


@dataclass(frozen=True)
class KeptText:
    r"""What stays of a completion once its stop string is cut off. Filled by `StopMatcher.result`.

    `tokens` and `token_ids` are parallel. Where every token is whole UTF-8, `tokens` join to `text`; other tokens
    are spelt `bytes:\xNN`, as HELM wants them, while `text` shows the character that they form together.
    """

    text: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]

    @property
    def n_kept(self) -> int:
        """How many of the pushed tokens stay, counted from the first; trims a parallel list of log-probabilities."""
        return len(self.token_ids)


class StopMatcher:
    """Collects one completion token by token and says when a stop string has appeared in its text.

    Among the stop strings present when one first appears, the one that starts earliest wins, and of two that start
    together the longer; the text ends where it starts. A push costs one search of the new bytes and the few before
    them that a stop string could reach back to, so a completion costs time linear in its length.
    """

    __slots__ = ("_cut", "_data", "_reach", "_starts", "_stop", "_stops", "_token_bytes", "_token_ids")

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        """`token_bytes` maps an id to the bytes it contributes; `stops` are non-empty strings, possibly none.

        Raises `RequestError` for an empty stop string and for one that is not valid Unicode.
        """
        self._token_bytes = token_bytes
        self._stops = [_encoded(stop) for stop in stops]
        self._reach = max(map(len, self._stops), default=1) - 1
        self._data = bytearray()
        self._starts: list[int] = []  # byte offset at which each token begins
        self._token_ids: list[int] = []
        self._cut: int | None = None  # byte offset at which the stop string begins
        self._stop: bytes = b""

    @property
    def stopped(self) -> bool:
        """True once a stop string has appeared."""
        return self._cut is not None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the completion, None while there is none."""
        return self._stop.decode("utf-8") if self.stopped else None

    def push(self, token_id: int) -> bool:
        """Append a token; return True if the text now contains a stop string.

        Raises `RuntimeError` after a stop string has appeared: the completion is over and takes no more tokens.
        """
        if self._cut is not None:
            raise RuntimeError("this completion has met its stop string; no token may follow")
        #     ... reach | new token       a match must end in the new token, so it begins at most
        #         [----stop----]          `reach` = longest stop - 1 bytes before it
        begin = len(self._data)
        self._starts.append(begin)
        self._token_ids.append(token_id)
        self._data += self._token_bytes(token_id)
        for stop in self._stops:
            at = self._data.find(stop, max(0, begin - self._reach))
            if at >= 0 and (self._cut is None or (at, -len(stop)) < (self._cut, -len(self._stop))):
                self._cut, self._stop = at, stop
        return self._cut is not None

    def result(self) -> KeptText:
        """Return what stays; may be called at any time, and changes nothing.

        The token that the stop string cuts in two stays with its text trimmed; those that begin at or behind the
        start of the stop string are dropped. A character that the last token leaves incomplete becomes U+FFFD.
        """
        end = len(self._data) if self._cut is None else self._cut
        n_kept = len(self._starts) if self._cut is None else bisect_left(self._starts, end)
        borders = [*self._starts[:n_kept], end]
        tokens = (helm_text(bytes(self._data[a:b])) for a, b in pairwise(borders))
        return KeptText(
            text=self._data[:end].decode("utf-8", errors="replace"),
            tokens=tuple(tokens),
            token_ids=tuple(self._token_ids[:n_kept]),
        )


def _encoded(stop: str) -> bytes:
    if not stop:
        raise RequestError("every stop string must be a non-empty string")
    try:
        return stop.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the stop string {stop!r} is not valid Unicode") from error
