"""Texts that precisions are measured on: WikiText-2, and the last words of LAMBADA's passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexgen_helm.checkpoint.paths import data_dir
from flexgen_helm.errors import UsageError

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

_WIKITEXT, _LAMBADA = "wikitext-2-raw-test.txt", "lambada_openai_test.jsonl"


@dataclass(frozen=True)
class LastWord:
    """The tokens that the model draws in place of a passage's last word, and the word's own."""

    drawn: tuple[int, ...]
    wanted: tuple[int, ...]

    @property
    def is_right(self) -> bool:
        return self.drawn == self.wanted


def wikitext_and_lambada(benchmark: str) -> tuple[str, list[str]]:
    """Return WikiText-2's test text, and LAMBADA's passages. Raises `UsageError` if they are not here."""
    from flexgen_helm.scenarios.data import json_lines

    folder = data_dir()
    if folder is None or not all((folder / name).is_file() for name in (_WIKITEXT, _LAMBADA)):
        raise UsageError(f"bench {benchmark} needs FLEXGEN_HELM_DATA to name a folder with {_WIKITEXT} and {_LAMBADA}")
    text = (folder / _WIKITEXT).read_bytes().decode("utf-8")
    return text, json_lines("text")((folder / _LAMBADA).read_text(encoding="utf-8"))


def last_words(engine: Engine, passages: Sequence[str]) -> list[LastWord]:
    """Draw the last word of each passage, with as many tokens as it has."""
    from flexgen_helm import GenerationRequest
    from flexgen_helm.scenarios.lambada import split_passage

    assert engine.tokenizer is not None
    wanted, asked = [], []
    for context, target in map(split_passage, passages):
        before = engine.tokenizer.encode(context)
        wanted.append(tuple(engine.tokenizer.encode(context + target)[len(before) :]))
        asked.append(GenerationRequest(prompt_token_ids=before, max_tokens=len(wanted[-1]), ignore_eos=True))
    answers = []
    for result, word in zip(engine.run(asked), wanted):
        if result.error is not None:
            raise result.error
        answers.append(LastWord(result.completions[0].token_ids, word))
    return answers
