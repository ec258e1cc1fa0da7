"""`flexgen-helm divergence`: how far precisions are from a baseline on a text, by KL divergence and perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexgen_helm.cli.console import print_json
from flexgen_helm.cli.engine_flags import check_engine_flags, load_engine
from flexgen_helm.cli.flags import JsonFlag, ModelName
from flexgen_helm.cli.perplexity import (
    MaxWindows,
    TextFile,
    WindowTokens,
    read_text,
    scored_logprobs,
    scoring_requests,
)
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import precision_named, split_precisions
from flexgen_helm.units import count

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.report.divergence import Divergence, Spread

DEFAULT_ROWS = 400


def divergence(
    model: ModelName,
    text: TextFile,
    window: WindowTokens,
    engine: EngineOptions,
    baseline: Annotated[str, typer.Option(help="The precision that the others are compared with.")] = "fp16",
    max_windows: MaxWindows = None,
    rows: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens whose whole distributions are compared.")
    ] = DEFAULT_ROWS,
    as_json: JsonFlag = False,
) -> None:
    """Measure how far other precisions are from FP16 on a text: KL divergence, same top token, perplexity.

    --precision may name several, with commas between; 4bit is the default. Windows are those of `perplexity`. The
    baseline's distributions wait on the disk, in the folder of --offload-dir.

    Example:
      flexgen-helm divergence smollm2-135m-instruct-q4_1 --text book.txt --window 1024 \\
        --precision 8bit,4bit
    """
    check_engine_flags(engine)
    precision_named(baseline)
    named = split_precisions(str(engine.get("precision", "4bit")))
    others = [name for name in dict.fromkeys(named) if name != baseline]
    if not others:
        raise UsageError(f"--precision names only the baseline {baseline}; add another one, such as --precision 4bit")
    _refuse_precision_in_name(model)
    content = read_text(text)

    def load(precision: str) -> Engine:
        return load_engine(model, {**engine, "precision": precision})

    folder = None if engine.get("offload_dir") is None else Path(str(engine["offload_dir"]))
    found: list[Divergence] = []
    for each in measure(load, baseline, others, content, window, max_windows, rows, folder):
        if not as_json:
            print("\n" * bool(found) + describe(each), flush=True)
        found.append(each)
    if as_json:
        from flexgen_helm.report.divergence import TextDivergence
        from flexgen_helm.report.scores import finite

        print_json(finite(asdict(TextDivergence(model, str(text), window, tuple(found)))))


def measure(
    load: Callable[[str], AbstractContextManager[Engine]],
    baseline: str,
    others: Sequence[str],
    text: str,
    window: int,
    max_windows: int | None = None,
    rows: int = DEFAULT_ROWS,
    folder: Path | None = None,
) -> Iterator[Divergence]:
    """Yield the divergence of each precision from the baseline over the windows of a text.

    load: opens the model in a precision; one is open at a time.
    rows: tokens whose whole distributions are compared.
    folder: where the baseline's rows wait; None for the folder of offloaded weights.
    Raises what `perplexity.measure` raises, and `UsageError` if the disk has no room.
    """
    import numpy as np

    from flexgen_helm.checkpoint.paths import state_dir
    from flexgen_helm.engine.divergence import BaselineRows, RowDivergence
    from flexgen_helm.report.divergence import ScoredTokens, divergence_between

    folder = state_dir() / "offload" if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as resources:
        with load(baseline) as engine:
            requests = scoring_requests(engine, text, window, max_windows)
            lengths = [len(request.prompt_token_ids or ()) for request in requests]
            kept = resources.enter_context(BaselineRows(folder, lengths, rows, engine.config.vocab_size))
            base = np.array(scored_logprobs(engine.run(requests, on_logits=kept)))
        documents = np.repeat(np.arange(len(lengths)), [length - 1 for length in lengths])
        for precision in others:
            found = RowDivergence(kept)
            with load(precision) as engine:
                own = np.array(scored_logprobs(engine.run(requests, on_logits=found)))
            found.require_all()
            scored = ScoredTokens(documents, base, own, found.same_top == 1, found.bounds, kept.sampled, found.exact)
            yield divergence_between(baseline, precision, scored)


def describe(found: Divergence) -> str:
    """Return a divergence as text for people."""
    windows = count(found.documents, "window")
    lines = [
        f"{found.precision} against {found.baseline}: {count(found.tokens, 'token')} in {windows}",
        f"  perplexity {found.perplexity:.4f}, {found.ratio:.4f} times {found.baseline_perplexity:.4f}"
        + ("" if found.interval is None else f" (95 %: {found.interval[0]:.4f} to {found.interval[1]:.4f})"),
        f"  same top token at {found.same_top:.2%}",
        _row("KL divergence, nats", "mean", "95 % interval", "median", "99 %", "largest"),
        _spread(f"{found.kl.tokens:,} tokens, exact", found.kl),
        _spread("all tokens, at least", found.kl_bound),
    ]
    if found.bound_share is not None:
        lines.append(f"  the lower bound is {found.bound_share:.1%} of the divergence where both are known")
    return "\n".join(lines)


def _spread(label: str, spread: Spread) -> str:
    interval = "" if spread.interval is None else f"{spread.interval[0]:.6f} … {spread.interval[1]:.6f}"
    figures = [f"{value:.6f}" for value in (spread.mean, spread.median, spread.p99, spread.largest)]
    return _row(label, figures[0], interval, *figures[1:])


def _row(label: str, mean: str, interval: str, *others: str) -> str:
    return f"  {label:22}{mean:>9}  {interval:>21}" + "".join(f"{text:>11}" for text in others)


def _refuse_precision_in_name(model: str) -> None:
    from flexgen_helm.checkpoint.names import resolve

    given: Any = resolve(model).options.get("precision")
    if given is not None:
        raise UsageError(
            f"the name {model} already means {given}; give the model's own name, and the precision with --precision"
        )
