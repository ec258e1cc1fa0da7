"""`flexgen-helm divergence`: how far precisions are from a baseline, on a text or on the runs of a suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.checkpoint.names import PREFIX, resolve
from flexgen_helm.cli.console import print_json, say
from flexgen_helm.cli.engine_flags import (
    DEFAULT_OUTPUT,
    JsonFlag,
    ModelName,
    OutputPath,
    check_engine_flags,
    load_engine,
)
from flexgen_helm.cli.perplexity import MaxWindows, read_text, scoring_requests
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.files import count
from flexgen_helm.quant.precisions import precision_named, split_precisions

if TYPE_CHECKING:
    from flexgen_helm.engine.divergence import ComparedPrompts
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.engine.executor import OnLogits
    from flexgen_helm.report.divergence import Divergence
    from flexgen_helm.report.paired import Vector

DEFAULT_ROWS = 400


def divergence(
    model: ModelName,
    engine: EngineOptions,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text in UTF-8; - reads stdin.")] = None,
    window: Annotated[int | None, typer.Option(min=2, metavar="TOKENS", help="Tokens of a window of the text.")] = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compare on the prompts and answers of this suite's runs instead."),
    ] = None,
    output_path: OutputPath = DEFAULT_OUTPUT,
    baseline: Annotated[str, typer.Option(help="The precision that the others are compared with.")] = "fp16",
    max_windows: MaxWindows = None,
    rows: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens whose whole distributions are compared, of each run entry.")
    ] = DEFAULT_ROWS,
    as_json: JsonFlag = False,
) -> None:
    """Measure how far other precisions are from FP16: KL divergence, same top token, perplexity.

    It compares on a text, in the windows of `perplexity`, or on the tokens that make the scores of a suite: the answers
    of the baseline's runs, or what these runs scored. --precision may name several, with commas between; 4bit is the
    default. The baseline's distributions wait on the disk, in the folder of --offload-dir.

    Example:
      flexgen-helm divergence smollm2-135m-instruct-q4_1 \\
        --text book.txt --window 1024 --precision 8bit,4bit
    """
    check_engine_flags(engine)
    precision_named(baseline)
    named = split_precisions(str(engine.get("precision", "4bit")))
    precisions = [name for name in dict.fromkeys(named) if name != baseline]
    if not precisions:
        raise UsageError(f"--precision names only the baseline {baseline}; add another one, such as --precision 4bit")
    if (meant := resolve(model).options.get("precision")) is not None:
        raise UsageError(
            f"the name {model} already means {meant}; give the model's own name, and the precision with --precision"
        )

    def load(precision: str) -> Engine:
        return load_engine(model, {**engine, "precision": precision})

    folder = None if engine.get("offload_dir") is None else Path(str(engine["offload_dir"]))
    if suite is not None:
        for flag, value in (("--text", text), ("--window", window), ("--max-windows", max_windows)):
            if value is not None:
                raise UsageError(f"--suite and {flag} exclude each other; leave one of them out")
        by_entry, document = _suite_prompts(model, baseline, output_path / "runs" / suite), "instance"
    elif text is None or window is None:
        raise UsageError("divergence needs a text and its --window, or a --suite; see flexgen-helm divergence --help")
    else:
        content, document = read_text(text), "window"

    def prompts(engine: Engine) -> dict[str, ComparedPrompts]:
        return by_entry if suite is not None else {"": text_windows(engine, content, window or 0, max_windows)}

    found: dict[str, list[Divergence]] = {}
    for entry, divergence in measure(load, [baseline, *precisions], prompts, rows, folder):
        if not as_json:
            print("\n" * bool(found) + describe(divergence, entry, document), flush=True)
        found.setdefault(entry, []).append(divergence)
    if as_json:
        from flexgen_helm.report.divergence import EntryDivergence, SuiteDivergence, TextDivergence
        from flexgen_helm.report.scores import finite

        if suite is not None:
            parts = tuple(EntryDivergence(entry, tuple(divergences)) for entry, divergences in found.items())
            print_json(finite(asdict(SuiteDivergence(model, suite, parts))))
        else:
            print_json(finite(asdict(TextDivergence(model, str(text), window or 0, tuple(found[""])))))


def _suite_prompts(model: str, baseline: str, suite: Path) -> dict[str, ComparedPrompts]:
    """Return what the runs of a model in the baseline were asked and answered, by run entry.

    Raises `UsageError` without such a run, and what `read_compared_prompts` raises.
    """
    from flexgen_helm.report.scores import read_finished_runs

    name = model.removeprefix(PREFIX).replace("/", "--")
    every = [run for run in read_finished_runs(suite) if run.precision == baseline]
    runs = [run for run in every if run.model == name]
    if not runs:
        there = ", ".join(dict.fromkeys(run.model for run in every)) or "no run"
        raise UsageError(f"the suite in {suite} has no run of {name} in {baseline}; in {baseline} it has {there}")
    from flexgen_helm.plugin.run_answers import read_compared_prompts  # imports HELM

    found = {run.entry: read_compared_prompts(run) for run in runs}
    for entry in [entry for entry, prompts in found.items() if not any(prompts.compared)]:
        say(f"{entry}: no answer has a token to compare, so it is left out")
        del found[entry]
    if not found:
        raise UsageError(f"no answer of {name} in {suite} has a token to compare")
    return found


def text_windows(engine: Engine, text: str, window: int, max_windows: int | None = None) -> ComparedPrompts:
    """Return the windows of a text. Raises `UsageError` as `perplexity.measure` does."""
    from flexgen_helm.engine.divergence import ComparedPrompts

    ids = [request.prompt_token_ids or () for request in scoring_requests(engine, text, window, max_windows)]
    return ComparedPrompts([*map(tuple, ids)], [range(1, len(tokens)) for tokens in ids], range(len(ids)))


def measure(
    load: Callable[[str], AbstractContextManager[Engine]],
    precisions: Sequence[str],
    prompts: Callable[[Engine], Mapping[str, ComparedPrompts]],
    rows: int = DEFAULT_ROWS,
    folder: Path | None = None,
) -> Iterator[tuple[str, Divergence]]:
    """Yield the divergence of other precisions from the first over each of several sets of prompts, by its name.

    load: opens the model in a precision; one is open at a time.
    prompts: returns the sets, given the baseline's engine.
    rows: tokens of a set whose whole distributions are compared.
    folder: where the baseline's rows wait; None for the folder of offloaded weights.
    Raises what `prompts` raises, the error of a result, and `UsageError` if the disk has no room.
    """
    import numpy as np

    from flexgen_helm.checkpoint.paths import state_dir
    from flexgen_helm.engine.divergence import BaselineRows, RowDivergence
    from flexgen_helm.report.divergence import ScoredTokens, divergence_between

    def logprobs(engine: Engine, compared: ComparedPrompts, on_logits: OnLogits) -> Vector:
        scores: list[float | None] = []
        for result, tokens in zip(engine.run(compared.requests(), on_logits=on_logits), compared.compared):
            if result.error is not None:
                raise result.error
            scores += (result.prompt_logprobs or ())[tokens.start : tokens.stop]
        return np.array(scores, np.float64)

    baseline, *compressed = precisions
    folder = state_dir() / "offload" if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as resources:
        kept, base = {}, {}
        with load(baseline) as engine:
            sets = prompts(engine)
            for name, compared in sets.items():
                baseline_rows = BaselineRows(folder, compared.compared, rows, engine.config.vocab_size)
                kept[name] = resources.enter_context(baseline_rows)
                base[name] = logprobs(engine, compared, kept[name])
        for precision in compressed:
            with load(precision) as engine:
                for name, compared in sets.items():
                    found = RowDivergence(kept[name])
                    scores = logprobs(engine, compared, found)
                    found.require_all()
                    numbers = {document: number for number, document in enumerate(dict.fromkeys(compared.documents))}
                    documents = [numbers[document] for document in compared.documents]
                    scored = ScoredTokens(
                        np.repeat(documents, list(map(len, compared.compared))),
                        base[name], scores, found.same_top == 1, kept[name].sampled, found.exact,
                    )  # fmt: skip
                    yield name, divergence_between(baseline, precision, scored)


def describe(found: Divergence, entry: str = "", document: str = "window") -> str:
    """Return a divergence as text for people; document: what it calls a part of what was compared."""
    kl, row = found.kl, "  {:22}{:>9}  {:>21}{:>11}{:>11}{:>11}".format
    interval = "" if kl.interval is None else f"{kl.interval[0]:.6f} … {kl.interval[1]:.6f}"
    mean, *quantiles = (f"{value:.6f}" for value in (kl.mean, kl.median, kl.p99, kl.largest))
    lines = [
        f"{entry + ': ' if entry else ''}{found.precision} against {found.baseline}: "
        f"{count(found.tokens, 'token')} in {count(found.documents, document)}",
        f"  perplexity {found.perplexity:.4f}, {found.ratio:.4f} times {found.baseline_perplexity:.4f}"
        + ("" if found.interval is None else f" (95 %: {found.interval[0]:.4f} to {found.interval[1]:.4f})"),
        f"  same top token at {found.same_top:.2%}",
        row("KL divergence, nats", "mean", "95 % interval", "median", "99 %", "largest"),
        row(f"{kl.tokens:,} tokens, exact", mean, interval, *quantiles),
    ]
    return "\n".join(lines)
