"""What `transformers` alone says of answers, in float32, one sequence at a time and without a
cache.

It computes in a process of its own, which imports nothing of the engine. A line of JSON in, a line
out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flexgen_helm.errors import FlexgenError
from flexgen_helm.request import GenerationRequest, GenerationResult


class Rescored(NamedTuple):
    """An answer with the log-probabilities of `transformers`.

    contradiction: what it says against the answer; "" if nothing.
    """

    request: GenerationRequest
    result: GenerationResult
    contradiction: str


class _Scores(NamedTuple):
    """What `transformers` says of a text, in nats.

    logprobs: of each token but the first.
    leads: of these tokens over the most probable other one; below 0 where that is more probable.
    end_lead: of the most probable end over all other tokens, behind the text.
    """

    logprobs: list[float]
    leads: list[float]
    end_lead: float


def by_transformers(
    folder: Path,
    ends: Collection[int],
    answers: Sequence[tuple[GenerationRequest, GenerationResult]],
    tolerance: float,
) -> Iterator[Rescored]:
    """Yield answers as `transformers` computes them.

    ends: token ids. tolerance: nats by which a greedy token, or the end, may be below the most
        probable token.
    Raises `FlexgenError` where `transformers` fails.
    """
    texts = [
        [*result.prompt_token_ids, *completion.token_ids]
        for _, result in answers
        for completion in result.completions
    ]
    scores = iter(_scores_of(folder, ends, texts))
    for request, result in answers:
        yield _rescored(request, result, [next(scores) for _ in result.completions], tolerance)


def _scores_of(
    folder: Path, ends: Collection[int], texts: Sequence[Sequence[int]]
) -> list[_Scores]:
    """Have a process of its own score texts of token ids."""
    end_ids = sorted(ends) or [0]  # without ends no answer has one, and its lead is not read
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__, str(folder)],
        input="".join(json.dumps([ids, end_ids]) + "\n" for ids in texts),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise FlexgenError(
            f"transformers ended with exit code {done.returncode} "
            f"({last[:300] or 'nothing said'}); it needs memory for all of {folder.name} in float32"
        )
    return [_Scores(*json.loads(line)) for line in done.stdout.splitlines()]


def _rescored(
    request: GenerationRequest,
    result: GenerationResult,
    scores: Sequence[_Scores],
    tolerance: float,
) -> Rescored:
    """Return an answer with the scores of its completions."""
    before_answer = len(result.prompt_token_ids) - 1
    completions = tuple(
        replace(completion, logprobs=tuple(score.logprobs[before_answer:]))
        for completion, score in zip(result.completions, scores)
    )
    prompt_scores = scores[0]  # the prompt is the same in all
    logprobs = result.prompt_logprobs and (None, *prompt_scores.logprobs[:before_answer])
    greedy = (
        result.prompt_greedy
        and (  # the first token has no log-probability
            None,
            *(
                lead > (-tolerance if was_greedy else tolerance)
                for was_greedy, lead in zip(result.prompt_greedy[1:], prompt_scores.leads)
            ),
        )
    )
    worst_lead = 0.0
    if request.temperature == 0:
        for completion, score in zip(result.completions, scores):
            has_end = completion.finish_reason == "endoftext"
            leads = [*score.leads[before_answer:], *([score.end_lead] if has_end else [])]
            worst_lead = min([worst_lead, *leads])
    is_contradicted = worst_lead < -tolerance
    return Rescored(
        request,
        replace(result, completions=completions, prompt_logprobs=logprobs, prompt_greedy=greedy),
        f"{-worst_lead:.3g} nats below the most probable token" if is_contradicted else "",
    )


def _main(folder: str) -> None:
    """Answer each line of the input with `_Scores`: it has the token ids of a text, and those of
    ends.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for line in sys.stdin:
        ids, ends = json.loads(line)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            tokens = torch.tensor(ids[1:], dtype=torch.long)[:, None]
            scored = logits[:-1].gather(1, tokens)
            logprobs = scored - logits[:-1].logsumexp(1, keepdim=True)
            leads = scored - logits[:-1].scatter(1, tokens, float("-inf")).amax(1, keepdim=True)
            end_lead = (
                logits[-1, ends].amax()
                - logits[-1].index_fill(0, torch.tensor(ends), float("-inf")).amax()
            )
        print(json.dumps([logprobs[:, 0].tolist(), leads[:, 0].tolist(), end_lead.item()]))


if __name__ == "__main__":
    _main(sys.argv[1])
