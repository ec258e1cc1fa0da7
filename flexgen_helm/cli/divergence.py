"""`flexgen-helm divergence`: how far precisions or a second model are from a baseline, on a text or a suite's runs."""

from __future__ import annotations

from dataclasses import asdict, replace
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
    complete_model,
)
from flexgen_helm.cli.perplexity import MaxWindows, read_text, windows_of
from flexgen_helm.config import EngineConfig, EngineOptions
from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.files import count
from flexgen_helm.hardware.process_state import rank_of_process
from flexgen_helm.quant.precisions import precision_named, split_precisions

if TYPE_CHECKING:
    from flexgen_helm.engine.divergence import ComparedPrompts
    from flexgen_helm.report.divergence import Divergence, Spread


def divergence(
    model: ModelName,
    engine: EngineOptions,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL2",
            help="A model with the same vocabulary to compare with the first, instead of precisions.",
            autocompletion=complete_model,
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text in UTF-8; - reads stdin.")] = None,
    window: Annotated[int | None, typer.Option(min=2, metavar="TOKENS", help="Tokens of a window of the text.")] = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compare on the prompts and answers of this suite's runs instead."),
    ] = None,
    output_path: OutputPath = DEFAULT_OUTPUT,
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="The first model's precision. Default: its name's, else fp16.")
    ] = None,
    max_windows: MaxWindows = None,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Also compare the hidden states after every layer.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure how far other precisions, or a second model, are from FP16: KL divergence, same top token, perplexity.

    It compares on a text, in the windows of `perplexity`, or on the tokens that make the scores of a suite: the answers
    of the first model's runs, or what these runs scored. Without a second model, --precision may name several, with
    commas between; 4bit is the default. Two compute side by side, each in half of the memory, and nothing is stored.

    Example:
      flexgen-helm divergence smollm2-135m-instruct-q4_1 \\
        --text book.txt --window 1024 --precision 8bit,4bit
    """
    check_engine_flags(engine)
    if rank_of_process() is not None:
        raise UsageError("two models are compared in one process; start divergence without torchrun")
    first = _named(model, baseline or (None if second else "fp16"))
    asked, baseline = engine.get("precision"), first[2]
    if second is not None:
        named = [first, _named(second, asked)]
    else:
        precisions = dict.fromkeys((baseline, *split_precisions(str(asked or "4bit"))))
        named = [(precision, model, precision) for precision in precisions]
    if len(named) < 2:
        raise UsageError(f"--precision names only the baseline {baseline}; add another one, such as --precision 4bit")
    if suite is not None:
        for flag, value in (("--text", text), ("--window", window), ("--max-windows", max_windows)):
            if value is not None:
                raise UsageError(f"--suite and {flag} exclude each other; leave one of them out")
        by_entry, document = _suite_prompts(model, baseline, output_path / "runs" / suite), "instance"
    elif text is None or window is None:
        raise UsageError("divergence needs a text and its --window, or a --suite; see flexgen-helm divergence --help")
    else:
        content, document = read_text(text), "window"

    import numpy as np

    from flexgen_helm.engine.divergence import ComparedPrompts, Lockstep, half_limits, require_comparable
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.engine.opening import open_files
    from flexgen_helm.report.divergence import ScoredTokens, divergence_between

    models = [
        (label, name, EngineConfig(**{**resolve(name).options, **engine, "precision": precision}))
        for label, name, precision in named
    ]
    if second is not None:
        require_comparable([open_files(resolve(name), options) for _, name, options in models], by_layer)
    limits = half_limits(models[0][2])
    # Opened one after the other, when they are asked for.
    engines = (Engine.from_config(name, replace(options, limits=limits)) for _, name, options in models)
    found: dict[str, list[Divergence]] = {}
    try:
        with next(engines) as base:
            if suite is None:
                windows = [*map(tuple, windows_of(base, content, window or 0, max_windows))]
                by_entry = {"": ComparedPrompts(windows, [range(1, len(ids)) for ids in windows], range(len(windows)))}
            for compared, (label, _, _) in zip(engines, models[1:]):
                with compared:
                    for entry, prompts in by_entry.items():
                        pair = Lockstep((base, compared), prompts, by_layer)
                        pair.run()
                        _, documents = np.unique([*map(str, prompts.documents)], return_inverse=True)
                        scored = ScoredTokens(np.repeat(documents, [*map(len, prompts.compared)]), *pair.values)
                        divergence = divergence_between(models[0][0], label, scored, pair.layers)
                        if not as_json:
                            print("\n" * bool(found) + describe(divergence, entry, document), flush=True)
                        found.setdefault(entry, []).append(divergence)
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"{error}; that is for one of the two models, which have half of the limit each"
        ) from error
    if as_json:
        from flexgen_helm.report.divergence import EntryDivergence, SuiteDivergence, TextDivergence
        from flexgen_helm.report.scores import finite

        if suite is not None:
            parts = tuple(EntryDivergence(entry, tuple(divergences)) for entry, divergences in found.items())
            print_json(finite(asdict(SuiteDivergence(model, suite, parts))))
        else:
            print_json(finite(asdict(TextDivergence(model, str(text), window or 0, tuple(found[""])))))


def _named(model: str, asked: str | None) -> tuple[str, str, str]:
    """Return what a model is called in the output, its name, and its precision.

    Raises `UsageError` for another precision than its name means.
    """
    meant = resolve(model).options.get("precision")
    if meant is not None and asked not in (None, meant):
        raise UsageError(f"the name {model} already means {meant}, and {asked} is asked for; give the model's own name")
    label = model.removeprefix(PREFIX) + (f"-{asked}" if asked else "")
    return label, model, precision_named(asked or meant or "fp16").name


def _suite_prompts(model: str, baseline: str, suite: Path) -> dict[str, ComparedPrompts]:
    """Return what the runs of a model in the baseline were asked and answered, by run entry.

    Raises `UsageError` without such a run, and what `read_compared_prompts` raises.
    """
    from flexgen_helm.report.scores import read_finished_runs

    name = model.removeprefix(PREFIX).replace("/", "--")
    every = [run for run in read_finished_runs(suite) if run.precision == baseline]
    runs = [run for run in every if run.model in (name, resolve(model).name)]
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


def describe(found: Divergence, entry: str = "", document: str = "window") -> str:
    """Return a divergence as text for people; document: what it calls a part of what was compared."""
    row = "  {:22}{:>9}  {:>21}{:>11}{:>11}{:>11}".format

    def spread(title: str, of: Spread) -> str:
        interval = "" if of.interval is None else f"{of.interval[0]:.6f} … {of.interval[1]:.6f}"
        mean, *quantiles = (f"{value:.6f}" for value in (of.mean, of.median, of.p99, of.largest))
        return row(title, mean, interval, *quantiles)

    lines = [
        f"{entry + ': ' if entry else ''}{found.precision} against {found.baseline}: "
        f"{count(found.tokens, 'token')} in {count(found.documents, document)}",
        f"  perplexity {found.perplexity:.4f}, {found.ratio:.4f} times {found.baseline_perplexity:.4f}"
        + ("" if found.interval is None else f" (95 %: {found.interval[0]:.4f} to {found.interval[1]:.4f})"),
        f"  same top token at {found.same_top:.2%}",
        row("nats", "mean", "95 % interval", "median", "99 %", "largest"),
        spread("KL divergence", found.kl),
        spread("|log-probability|", found.logprob),
    ]
    if found.layers is not None:
        from flexgen_helm.report.tables import layers_table, text

        lines.append(text(layers_table(found), 80))
    return "\n".join(lines)
