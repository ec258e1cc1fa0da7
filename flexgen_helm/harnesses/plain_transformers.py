"""What `transformers` alone says of answers, in float32, one sequence at a time and without a cache.

It computes in a process of its own, which imports nothing of the engine. A line of JSON in, a line out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexgen_helm.errors import FlexgenError
from flexgen_helm.request import GenerationRequest, GenerationResult


def by_transformers(
    folder: Path,
    ends: Collection[int],
    answers: Sequence[tuple[GenerationRequest, GenerationResult]],
    tolerance: float,
) -> Iterator[tuple[GenerationResult, str]]:
    """Yield results with the log-probabilities of `transformers`, and what contradicts it; "" if nothing does.

    ends: token ids. tolerance: nats by which a greedy token, or the end, may be below the most probable token.
    Raises `FlexgenError` where `transformers` fails.
    """
    scores = _scores(
        folder,
        [
            ([*result.prompt_token_ids, *completion.token_ids], sorted(ends) or [0])
            for _, result in answers
            for completion in result.completions
        ],
    )
    for request, result in answers:
        length, completions, least = len(result.prompt_token_ids), [], 0.0
        for completion in result.completions:
            logprobs, leads, end = next(scores)
            # Of no first token.
            prompt, prompt_leads = (None, *logprobs[: length - 1]), (None, *leads[: length - 1])
            completions.append(replace(completion, logprobs=tuple(logprobs[length - 1 :])))
            if request.temperature == 0:
                least = min([least, *leads[length - 1 :], *[end] * (completion.finish_reason == "endoftext")])
        computed = replace(result, completions=tuple(completions))
        if result.prompt_logprobs is not None:
            computed = replace(computed, prompt_logprobs=prompt)
        if result.prompt_greedy is not None:
            pairs = zip(result.prompt_greedy, prompt_leads)
            greedy = (said if lead is None else lead > (-tolerance if said else tolerance) for said, lead in pairs)
            computed = replace(computed, prompt_greedy=tuple(greedy))
        yield computed, f"{-least:.3g} nats below the most probable token" if least < -tolerance else ""


def _scores(folder: Path, sequences: Sequence[Any]) -> Iterator[Any]:
    """Yield what the child says of sequences (ids, ids of which one may follow).

    Of each token but the first its log-probability, and its lead over the most probable other token; and the lead of
    the most probable end.
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
        ids, ends = json.loads(line)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            tokens = torch.tensor(ids[1:], dtype=torch.long)[:, None]
            scored = logits[:-1].gather(1, tokens)
            logprobs = scored - logits[:-1].logsumexp(1, keepdim=True)
            leads = scored - logits[:-1].scatter(1, tokens, float("-inf")).amax(1, keepdim=True)
            end = logits[-1, ends].amax() - logits[-1].index_fill(0, torch.tensor(ends), float("-inf")).amax()
        print(json.dumps([logprobs[:, 0].tolist(), leads[:, 0].tolist(), end.item()]), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
