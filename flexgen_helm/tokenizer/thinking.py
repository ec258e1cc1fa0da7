"""Thinking models: where the thinking of a completion ends and its answer begins. No torch.

    <think>The user asks …</think>\\n\\nParis.
    thinking--------------         answer-

The chat template may write `<think>` at the end of the prompt; then the completion begins inside.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Literal

from flexgen_helm.request import Completion
from flexgen_helm.tokenizer.token_bytes import helm_bytes, helm_text

BEGIN, END = b"<think>", b"</think>"
# What a spent budget makes the model write.
FORCED_END = "\n</think>\n\n"


class ThinkingTracker:
    """Follows one completion and says from where on its stop strings count.

    Inside thinking they do not, nor in the white space behind it: "\\n" would end every thinking completion at once.
    While a completion may still become `<think>` they wait.
    """

    __slots__ = ("_at", "_stage", "num_thinking_tokens")

    def __init__(self, begins_inside: bool) -> None:
        self._stage: Literal["undecided", "thinking", "after", "answer"] = "thinking" if begins_inside else "undecided"
        self._at = 0  # from where on to search, and in the end where the answer begins
        self.num_thinking_tokens = 0

    @property
    def is_thinking(self) -> bool:
        return self._stage == "thinking"

    @property
    def answer_start(self) -> int | None:
        """The byte from which stop strings count; None before."""
        return self._at if self._stage == "answer" else None

    def push(self, data: bytearray) -> None:
        """Look at the bytes so far, after each token."""
        self.num_thinking_tokens += self.is_thinking
        if self._stage == "undecided":
            text = bytes(data).lstrip()
            if text.startswith(BEGIN):
                self._stage, self._at = "thinking", len(data) - len(text) + len(BEGIN)
            elif not BEGIN.startswith(text):
                self._stage = "answer"
        if self._stage == "thinking":
            end = data.find(END, self._at)
            # A later search finds an end that is cut in two now.
            self._at = max(self._at, len(data) - len(END) + 1) if end < 0 else end + len(END)
            if end >= 0:
                self._stage = "after"
        if self._stage == "after":
            while self._at < len(data) and data[self._at : self._at + 1].isspace():
                self._at += 1
            if self._at < len(data):
                self._stage = "answer"

    def finish(self) -> None:
        """Take a completion that ended undecided for an answer."""
        if self._stage == "undecided":
            self._stage = "answer"


def split_thinking(completion: Completion, begins_inside: bool) -> tuple[str | None, Completion]:
    """Return the thinking of a completion and its answer; (None, completion) if there is no thinking.

    Thinking that has no end leaves an empty answer. An end without a beginning makes what precedes it thinking: some
    models begin inside thinking though their templates do not say so.
    """
    pieces = [helm_bytes(token) for token in completion.tokens]
    data = b"".join(pieces)
    text = data.lstrip()
    start = len(data) - len(text) + len(BEGIN) if text.startswith(BEGIN) else 0
    end = data.find(END)
    if not (begins_inside or start) and end < 0:
        return None, completion
    if end < 0:
        return _text(data[start:]).removeprefix("\n"), replace(
            completion, text="", tokens=(), token_ids=(), logprobs=(), top_logprobs=()
        )
    answer = data[end + len(END) :].lstrip(b"\n")
    answer_start = len(data) - len(answer)
    borders = list(accumulate(map(len, pieces)))  # where each token ends
    first = next((index for index, border in enumerate(borders) if border > answer_start), len(pieces))
    tokens = completion.tokens[first:]
    if tokens and borders[first] - answer_start < len(pieces[first]):  # the token that both have a part of
        tokens = (helm_text(pieces[first][answer_start - borders[first] :]), *tokens[1:])
    answered = replace(
        completion,
        text=_text(answer),
        tokens=tokens,
        token_ids=completion.token_ids[first:],
        logprobs=completion.logprobs[first:],
        top_logprobs=completion.top_logprobs[first:],
    )
    return _text(data[start:end]).removeprefix("\n").removesuffix("\n"), answered


def is_unfinished(completion: Completion, begins_inside: bool) -> bool:
    """Whether a completion ended while the model was still thinking."""
    return split_thinking(completion, begins_inside)[0] is not None and END.decode() not in completion.text


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
