"""Thinking models: where the thinking of a completion ends and its answer begins. No torch.

    <think>The user asks …</think>\\n\\nParis.
    thinking--------------         answer-

The chat template may write `<think>` at the end of the prompt; then the completion begins inside.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal

from flexgen_helm.request import Completion, ThinkingFormat
from flexgen_helm.tokenizer.token_bytes import helm_bytes, helm_text

# What models write before and behind their thoughts. Template and vocabulary are searched for the
# second.
MARKS = (
    ("<|channel|>", "<|channel|>final<|message|>"),
    ("<|channel>", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("Here is my thought process:", "Here is my response:"),
    *(
        (f"<{name}>", f"</{name}>")
        for name in ("think", "think:opensource", "longcat_think", "thought")
    ),
)
# What some of them write around the answer.
WRAPPERS = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("<response>", "</response>"),
    ("<answer>", "</answer>"),
    ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
)
# What gpt-oss may write inside its mark, before `<|message|>`: a format of the answer, and the most
# bytes that it has.
_FORMAT, _FORMAT_BYTES = rb"(?:\s[^<]{0,32})?(?:<\|constrain\|>[^<]{0,32})?", 80


class ThinkingTracker:
    """Follows one completion and says from where on its stop strings count.

    Inside thinking they do not, nor in the white space behind it: "\\n" would end every thinking
    completion at once.
    While a completion may still become `<think>` they wait.
    """

    def __init__(self, thinking: ThinkingFormat) -> None:
        self._begin, end, self._opening, _ = (mark.encode() for mark in thinking.marks)
        self._end, self._end_bytes = _pattern(end), len(end) + _FORMAT_BYTES  # of the longest one
        self._stage: Literal["undecided", "thinking", "after", "answer"]
        self._stage = "thinking" if thinking.begins_inside else "undecided"
        self._search_from = 0  # from where on to search, and in the end where the answer begins
        self.num_thinking_tokens = 0

    @property
    def is_thinking(self) -> bool:
        return self._stage == "thinking"

    @property
    def answer_start(self) -> int | None:
        """The byte from which stop strings count; None before."""
        return self._search_from if self._stage == "answer" else None

    def push(self, data: bytearray) -> None:
        """Look at the bytes so far, after each token."""
        self.num_thinking_tokens += self.is_thinking
        if self._stage == "undecided":
            text = bytes(data).lstrip()
            if text.startswith(self._begin):
                # An end mark may begin with the begin mark (`<|channel|>`), so the search starts at
                # the latter.
                self._stage, self._search_from = "thinking", len(data) - len(text)
            elif not self._begin.startswith(text):
                self._stage = "answer"
        if self._stage == "thinking":
            end_mark = self._end.search(data, self._search_from)
            # The next search begins where an end that is here in part may begin.
            self._search_from = (
                end_mark.end() if end_mark else max(self._search_from, len(data) - self._end_bytes)
            )
            if end_mark:
                self._stage = "after"
        if self._stage == "after":
            text = bytes(data[self._search_from :]).lstrip()
            if self._opening and text.startswith(self._opening):
                text, self._opening = text.removeprefix(self._opening).lstrip(), b""
            self._search_from = len(data) - len(text)
            if not self._opening.startswith(text):
                self._stage = "answer"

    def finish(self) -> None:
        """Take a completion that ended undecided for an answer."""
        if self._stage in ("undecided", "after"):
            self._stage = "answer"


def split_thinking(
    completion: Completion, thinking: ThinkingFormat
) -> tuple[str | None, Completion]:
    """Return the thinking of a completion and its answer; None and the completion without thinking.

    Thinking that has no end leaves an empty answer. An end without a beginning makes what precedes
    it thinking: some models begin inside thinking though their templates do not say so.
    """
    begin, end, opening, closing = (mark.encode() for mark in thinking.marks)
    data = b"".join(map(helm_bytes, completion.tokens))
    start = _behind_mark(data, begin)
    thought, answer = None, data
    if end_mark := _pattern(end).search(data):
        thought = _text(data[start : end_mark.start()]).removeprefix("\n").removesuffix("\n")
        answer = data[end_mark.end() :].lstrip(b"\n")
    elif thinking.begins_inside or start:
        thought, answer = _text(data[start:]).removeprefix("\n"), b""
    if opening and answer.lstrip().startswith(opening):
        answer = answer.lstrip().removeprefix(opening).lstrip(b"\n")
    first = len(data) - len(answer)
    if closing and answer.rstrip().endswith(closing):
        answer = answer.rstrip().removesuffix(closing).rstrip(b"\n")
    if len(answer) == len(data):
        return thought, completion
    return thought, _cut_tokens(completion, first, first + len(answer))


def _cut_tokens(completion: Completion, first: int, last: int) -> Completion:
    r"""Return the bytes from `first` up to `last` of a completion, and the tokens that have them.

    tokens     <think> hm </think> \nPar is
    borders   0       7  9        17    21 23
    kept                          [          )      first 18, last 23
    """
    pieces = [helm_bytes(token) for token in completion.tokens]
    data, borders = b"".join(pieces), [0, *accumulate(map(len, pieces))]
    kept = slice(
        bisect_right(borders, first) - 1,
        # Tokens without bytes at the very end are the answer's.
        bisect_left(borders, last) if last < len(data) else None,
    )
    cut = [
        helm_text(data[max(start, first) : min(stop, last)]) for start, stop in pairwise(borders)
    ]
    return replace(
        completion,
        text=_text(data[first:last]),
        tokens=tuple(cut[kept]),
        token_ids=completion.token_ids[kept],
        logprobs=completion.logprobs[kept],
        top_logprobs=completion.top_logprobs[kept],
    )


def is_unfinished(completion: Completion, thinking: ThinkingFormat) -> bool:
    """Whether a completion ended while the model was still thinking."""
    begin, end, *_ = (mark.encode() for mark in thinking.marks)
    data = completion.text.encode()
    has_begun = thinking.begins_inside or _behind_mark(data, begin) > 0
    return has_begun and not _pattern(end).search(data)


def _behind_mark(data: bytes, begin: bytes) -> int:
    """Return where the text behind a first mark begins; 0 without the mark."""
    text = data.lstrip()
    return len(data) - len(text) + len(begin) if text.startswith(begin) else 0


def _pattern(end: bytes) -> re.Pattern[bytes]:
    """Return what finds the end of thinking.

    <|channel|>final<|message|> also as <|channel|>final <|constrain|>json<|message|>.
    """
    head, bar, tail = end.partition(b"<|message|>")
    return re.compile(re.escape(head) + _FORMAT * bool(bar) + re.escape(bar + tail))


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
