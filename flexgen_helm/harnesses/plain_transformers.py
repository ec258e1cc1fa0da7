"""Log-probabilities by `transformers` alone, in float32, one sequence at a time and without a cache.

They are computed in a process of its own, which imports nothing of the engine. A line of JSON in, a line out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from flexgen_helm.errors import FlexgenError


class ScoredSequence(NamedTuple):
    """Tokens of which log-probabilities are wanted.

    start: index of the first of them, at least 1.
    answer: index of the first one that the model wrote.
    ends: ids of which one should follow; none if that is not known.
    """

    ids: Sequence[int]
    start: int
    answer: int
    ends: Sequence[int]


class SequenceScores(NamedTuple):
    """What `transformers` says of a sequence.

    logprobs: of the tokens from `start` on.
    shortfall: nats by which a token of the answer, or its end, is below the most probable one; the largest.
    """

    logprobs: Sequence[float]
    shortfall: float


def score_sequences(folder: Path, sequences: Sequence[ScoredSequence]) -> Iterator[SequenceScores]:
    """Yield the scores of sequences. Raises `FlexgenError` where `transformers` fails, with its last line."""
    command = [sys.executable, "-m", __name__, str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as messages:
        asked.write("".join(json.dumps(sequence) + "\n" for sequence in sequences).encode())
        asked.seek(0)
        with subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, stderr=messages, env=environment) as child:
            try:
                for line in child.stdout or ():
                    yield SequenceScores(*json.loads(line))
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
            logprobs = logits[:-1].gather(1, torch.tensor(ids[start:], dtype=torch.long)[:, None])[:, 0]
            drawn = torch.cat([logprobs, logits[-1:, ends].amax(1)]) if ends else logprobs
            below = (logits[: len(drawn)].amax(1) - drawn)[answer - start :]
            logprobs = logprobs - logits[:-1].logsumexp(1)
        print(json.dumps([logprobs.tolist(), max(below.tolist(), default=0.0)]), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
