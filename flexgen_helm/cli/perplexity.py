"""`flexgen-helm perplexity`: token perplexity of a text over non-overlapping windows."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexgen_helm.cli.console import TokenProgress, print_json
from flexgen_helm.cli.engine_flags import load_engine
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import UsageError

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine


def perplexity(
    model: Annotated[str, typer.Argument(help="Catalogue name, org--repo of the hub, folder or .gguf file.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text, UTF-8; - reads stdin.")],
    window: Annotated[int, typer.Option(min=2, metavar="W", help="Tokens of a window.")],
    engine: EngineOptions,
    max_windows: Annotated[int | None, typer.Option(min=1, help="Use only the first so many windows.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Token perplexity over non-overlapping windows of W tokens: no BOS, a window's first token is not scored."""
    content = _read(text)
    with load_engine(model, engine) as loaded:
        found = measure(loaded, content, window, max_windows)
    if as_json:
        print_json(found)
    else:
        print(
            f"perplexity {found['perplexity']:.4f} over {found['tokens_scored']:,} tokens "
            f"(total negative log-likelihood {found['nll']:.3f} nats)"
        )


def measure(engine: Engine, text: str, window: int, max_windows: int | None = None) -> dict[str, Any]:
    """{tokens_scored, nll, perplexity} of `text`; `nll` is the total in nats.

    Raises `UsageError` where the window exceeds the model's or the text has no token to score.
    """
    from flexgen_helm.request import GenerationRequest

    if engine.tokenizer is None:
        raise UsageError(f"the model {engine.name} has no tokenizer files, so it cannot read a text")
    if window > engine.config.max_positions:
        raise UsageError(f"--window {window} is beyond the {engine.config.max_positions} positions of {engine.name}")
    rows = windows(engine.tokenizer.encode(text, add_special_tokens=False), window)[:max_windows]
    if not rows:
        raise UsageError("the text has fewer than 2 tokens, so there is nothing to score")
    requests = [GenerationRequest(prompt_token_ids=row, max_tokens=0, echo_logprobs=True) for row in rows]
    with TokenProgress() as progress:
        results = engine.run(requests, progress=progress)
    scores: list[float] = []
    for result in results:
        if result.error is not None:
            raise result.error
        scores += [score for score in result.prompt_logprobs or () if score is not None]
    nll = -math.fsum(scores)
    return {"tokens_scored": len(scores), "nll": nll, "perplexity": math.exp(nll / len(scores))}


def windows(token_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """Consecutive windows of `size` tokens; the last, shorter one is kept if it has a token to score."""
    found = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    return [row for row in found if len(row) > 1]


def _read(path: Path) -> str:
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise UsageError(f"--text {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path} is not UTF-8: {error}") from error
