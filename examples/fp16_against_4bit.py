"""Compare FP16 with 4 bits on a text: perplexity, and the memory that weights and KV cache take.

    python examples/fp16_against_4bit.py [MODEL] [TEXT FILE]

For whole HELM suites, with confidence intervals and tests:
`flexgen-helm run --precision fp16,4bit …` and then `flexgen-helm compare`.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from flexgen_helm import Engine, GenerationRequest, MemoryLimits

# With room to spare the engine would unpack the weights once; under this limit they stay in 4 bits.
LIMITS = MemoryLimits(cpu=400_000_000)

TEXT = """The sun rises in the east and sets in the west. Plants turn its light into sugar, animals eat the plants, and
in the end almost all life on the surface of the earth depends on it. In the deep sea there are exceptions: some
bacteria live on the minerals of hot springs, and worms and crabs live on the bacteria."""


def main(model: str = "smollm2-135m-instruct-q4_1", text_file: str | None = None) -> None:
    text = TEXT if text_file is None else Path(text_file).read_text(encoding="utf-8")
    for precision in ("fp16", "4bit"):
        with Engine.from_pretrained(model, precision=precision, limits=LIMITS) as engine:
            # max_tokens=0 with echo_logprobs scores the prompt and generates nothing.
            (result,) = engine.run(
                [GenerationRequest(prompt=text, max_tokens=0, echo_logprobs=True)]
            )
            record = engine.last_run
        if result.error is not None:
            raise result.error
        # the first token has none
        scores = [score for score in result.prompt_logprobs or () if score is not None]
        perplexity = math.exp(-sum(scores) / len(scores))
        print(
            f"{precision:5} perplexity {perplexity:9.3f}   peak memory "
            f"{record['peak_bytes']['cpu'] / 1e6:7.1f} MB"
        )


if __name__ == "__main__":
    main(*sys.argv[1:3])
