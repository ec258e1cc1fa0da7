"""Recorded answers by `transformers` alone, in float32, one sequence at a time and without a cache.

They are computed in a process of its own, which imports nothing of the engine. A line of JSON in, a line out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.tokenizer.token_bytes import helm_bytes

if TYPE_CHECKING:
    from flexgen_helm.report.verification import Answer, DrawnAnswer
    from flexgen_helm.tokenizer.tokenizer import Tokenizer


def recomputed(
    folder: Path, tokenizer: Tokenizer, drawn: Sequence[DrawnAnswer], tolerance: float
) -> Iterator[list[Answer]]:
    """Yield the answers as `transformers` has them, given their tokens.

    tolerance: nats by which a greedy token, or the end, may be below the most probable token.
    Raises `UsageError` for a text that is no token, and `FlexgenError` where `transformers` fails.
    """
    ids = {text: number for number, text in enumerate(tokenizer.token_texts(range(tokenizer.vocab_size)))}

    def id_of(text: str) -> int:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.token_texts(encoded) == [text]:
            return encoded[0]
        if not text or text not in ids:
            raise UsageError(f"a recorded token is {text[:60]!r}, which is none of {folder.name}; leave --with out")
        return ids[text]

    def to_score(answer: DrawnAnswer, recorded: Answer) -> tuple[list[int], int, int, list[int]]:
        prompt, written = list(answer.request.prompt_token_ids or ()), recorded.tokens[answer.echoed :]
        if recorded.end == "stop":  # the text of the last token may have been cut
            written = written[:-1]
        ends = sorted(tokenizer.eos_ids) if recorded.end == "endoftext" else []
        # The first token of all has no log-probability.
        return prompt + list(map(id_of, written)), max(1, len(prompt) - answer.echoed), len(prompt), ends

    scores = _scores(folder, [to_score(answer, recorded) for answer in drawn for recorded in answer.answers])
    for answer in drawn:
        yield [_computed(answer, recorded, next(scores), tokenizer, tolerance) for recorded in answer.answers]


def _computed(
    drawn: DrawnAnswer,
    recorded: Answer,
    scored: tuple[list[float], float],
    tokenizer: Tokenizer,
    tolerance: float,
) -> Answer:
    logprobs, shortfall = scored
    prompt, end = drawn.request.prompt_token_ids or (), recorded.end
    echoed, written = tokenizer.token_texts(prompt[len(prompt) - drawn.echoed :]), recorded.tokens[drawn.echoed :]
    if drawn.request.temperature == 0 and shortfall > tolerance:
        end = f"{shortfall:.3g} nats below the most probable token"
    elif end == "length" and len(written) != drawn.request.max_tokens:
        end = f"{len(written)} tokens of {drawn.request.max_tokens}"
    # What is not computed: the first token of all, and one that was cut.
    first = drawn.echoed == len(prompt)
    logprobs = [*recorded.logprobs[:first], *logprobs]
    logprobs += recorded.logprobs[len(logprobs) :]
    text = b"".join(map(helm_bytes, written)).decode(errors="replace")
    return replace(recorded, text=text, end=end, tokens=[*echoed, *written], logprobs=logprobs, logprob=None)


def _scores(folder: Path, sequences: Sequence[Any]) -> Iterator[Any]:
    """Yield what the child says of sequences: log-probabilities from `start` on, and the greedy shortfall.

    sequences: ids, start, where the answer begins, ids of which one should follow.
    """
    command = [sys.executable, "-P", "-m", __name__, str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as messages:
        asked.write("".join(json.dumps(sequence) + "\n" for sequence in sequences).encode())
        asked.seek(0)
        with subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, stderr=messages, env=environment) as child:
            try:
                yield from map(json.loads, child.stdout or ())
            except BaseException:
                child.kill()
                raise
        if child.returncode:
            messages.seek(0)
            last = messages.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise FlexgenError(
                f"transformers ended with exit code {child.returncode} ({last[:300] or 'nothing said'}); "
                f"it needs memory for all of {folder.name} in float32"
            )


def _main(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for line in sys.stdin:
        ids, start, answer, ends = json.loads(line)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 :]
            scored = logits[:-1].gather(1, torch.tensor(ids[start:], dtype=torch.long)[:, None])[:, 0]
            drawn = torch.cat([scored, logits[-1:, ends].amax(1)]) if ends else scored
            below = logits[: len(drawn)].amax(1) - drawn
            logprobs = scored - logits[:-1].logsumexp(1)
        print(json.dumps([logprobs.tolist(), max(below[answer - start :].tolist(), default=0.0)]), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
