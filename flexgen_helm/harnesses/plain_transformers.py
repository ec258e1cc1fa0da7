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

from flexgen_helm.errors import FlexgenError
from flexgen_helm.request import GenerationRequest, GenerationResult


def by_transformers(
    folder: Path,
    ends: Collection[int],
    answers: Sequence[tuple[GenerationRequest, GenerationResult]],
    tolerance: float,
) -> Iterator[tuple[tuple[GenerationRequest, GenerationResult], str]]:
    """Yield answers with the log-probabilities of `transformers`, and what contradicts it; "" if
    nothing does.

    ends: token ids. tolerance: nats by which a greedy token, or the end, may be below the most
        probable token.
    Raises `FlexgenError` where `transformers` fails.
    """
    texts = [
        [*result.prompt_token_ids, *one.token_ids]
        for _, result in answers
        for one in result.completions
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__, str(folder)],
        input="".join(json.dumps([ids, sorted(ends) or [0]]) + "\n" for ids in texts),
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
    scores = map(json.loads, done.stdout.splitlines())
    for request, result in answers:
        first, completions, least = len(result.prompt_token_ids) - 1, [], 0.0
        for completion in result.completions:
            logprobs, leads, end = next(scores)
            completions.append(replace(completion, logprobs=tuple(logprobs[first:])))
            if request.temperature == 0:
                least = min(
                    [least, *leads[first:], *[end] * (completion.finish_reason == "endoftext")]
                )
        greedy = result.prompt_greedy
        computed = replace(
            result,
            completions=tuple(completions),
            # the first token has none
            prompt_logprobs=result.prompt_logprobs and (None, *logprobs[:first]),
            prompt_greedy=greedy
            and (
                None,
                *(
                    lead > (-tolerance if said else tolerance)
                    for said, lead in zip(greedy[1:], leads)
                ),
            ),
        )
        yield (
            (request, computed),
            f"{-least:.3g} nats below the most probable token" if least < -tolerance else "",
        )


def _main(folder: str) -> None:
    """Answer lines: ids, and ids of which one may follow.

    Of each token but the first its log-probability, and its lead over the most probable other
    token; and the lead of the most probable end.
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
            end = (
                logits[-1, ends].amax()
                - logits[-1].index_fill(0, torch.tensor(ends), float("-inf")).amax()
            )
        print(json.dumps([logprobs[:, 0].tolist(), leads[:, 0].tolist(), end.item()]))


if __name__ == "__main__":
    _main(sys.argv[1])
