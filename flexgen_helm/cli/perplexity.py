"""`flexgen-helm perplexity`: token perplexity of a text over non-overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexgen_helm.cli.console import print_json, read_input
from flexgen_helm.cli.engine_flags import JsonFlag, ModelName, load_engine
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.request import GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

TextFile = Annotated[Path, typer.Option(metavar="FILE", help="Text in UTF-8; - reads stdin.")]
WindowTokens = Annotated[int, typer.Option(min=2, metavar="TOKENS", help="Tokens of a window.")]
MaxWindows = Annotated[int | None, typer.Option(min=1, metavar="N", help="Score only the first N windows.")]


def perplexity(
    model: ModelName,
    text: TextFile,
    window: WindowTokens,
    engine: EngineOptions,
    max_windows: MaxWindows = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a model's token perplexity on a text, without HELM.

    Windows do not overlap, have no BOS token, and their first tokens are not scored.

    Example:
      flexgen-helm perplexity smollm2-135m-instruct-q4_1 \\
        --text book.txt --window 1024
    """
    content = read_text(text)
    with load_engine(model, engine) as loaded:
        result = measure(loaded, content, window, max_windows)
    if as_json:
        from flexgen_helm.report.scores import finite

        print_json(finite(result))
    else:
        print(
            f"perplexity {result['perplexity']:.4f} over {result['tokens_scored']:,} tokens "
            f"(total negative log-likelihood {result['nll']:.3f} nats)"
        )


def measure(engine: Engine, text: str, window: int, max_windows: int | None = None) -> dict[str, Any]:
    """Return {tokens_scored, nll, perplexity} of `text`; `nll` is the total in nats.

    The perplexity is infinite where a float cannot hold it.
    Raises `UsageError` if the window exceeds the model's or the text has no token to score.
    """
    windows = windows_of(engine, text, window, max_windows)
    requests = [GenerationRequest(prompt_token_ids=ids, max_tokens=0, echo_logprobs=True) for ids in windows]
    logprobs = scored_logprobs(engine.run(requests))
    nll = -math.fsum(logprobs)
    mean = nll / len(logprobs)
    return {"tokens_scored": len(logprobs), "nll": nll, "perplexity": math.exp(mean) if mean < 709 else math.inf}


def read_text(path: Path) -> str:
    """Return the text that --text names. Raises `UsageError`."""
    try:
        return read_input("--text", path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path} is not UTF-8: {error}") from error


def windows_of(engine: Engine, text: str, window: int, max_windows: int | None) -> list[Sequence[int]]:
    """Return the tokens of each window of a text. Raises `UsageError` as `measure` does."""
    if engine.tokenizer is None:
        raise UsageError(f"the model {engine.name} has no tokenizer files, so it cannot read a text")
    if window > engine.config.max_positions:
        raise UsageError(f"--window {window} is beyond the {engine.config.max_positions} positions of {engine.name}")
    scored = windows(engine.tokenizer.encode(text, add_special_tokens=False), window)[:max_windows]
    if not scored:
        raise UsageError("the text has fewer than 2 tokens, so there is nothing to score")
    return scored


def scored_logprobs(results: Sequence[GenerationResult]) -> list[float]:
    """Return the log-probabilities of all scored tokens, in order. Raises the error of a result."""
    logprobs: list[float] = []
    for result in results:
        if result.error is not None:
            raise result.error
        logprobs += [logprob for logprob in result.prompt_logprobs or () if logprob is not None]
    return logprobs


def windows(token_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """Return consecutive windows of `size` tokens. The last may be shorter; a single token cannot be scored."""
    return [token_ids[start : start + size] for start in range(0, len(token_ids) - 1, size)]
