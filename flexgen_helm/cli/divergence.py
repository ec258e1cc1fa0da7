"""`flexgen-helm divergence`: a model's perplexity on a text, and how far precisions or a second
model are from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.checkpoint.names import PREFIX, resolve
from flexgen_helm.cli.console import print_json, read_input, say
from flexgen_helm.cli.engine_flags import (
    DEFAULT_OUTPUT,
    JsonFlag,
    ModelName,
    OutputPath,
    check_engine_flags,
    complete_model,
)
from flexgen_helm.config import EngineConfig, EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.files import count
from flexgen_helm.hardware.process_state import rank_of_process
from flexgen_helm.quant.precisions import precision_named, split_precisions
from flexgen_helm.terminal import table_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flexgen_helm.checkpoint.checkpoint import Checkpoint
    from flexgen_helm.engine.divergence import Compared, ComparedPrompts
    from flexgen_helm.report.divergence import Divergence, ScoredTokens, TokenStatistics
    from flexgen_helm.tokenizer.tokenizer import Tokenizer


# Label, name, and options.
_Model = tuple[str, str, EngineConfig]
_Second = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL2",
        help="A model with the same vocabulary to compare with the first, instead of precisions.",
        autocompletion=complete_model,
    ),
]
_Text = Annotated[Path | None, typer.Option(metavar="FILE", help="Text in UTF-8; - reads stdin.")]
_Window = Annotated[
    int | None, typer.Option(min=2, metavar="TOKENS", help="Tokens of a window of the text.")
]
_Suite = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=("Compare on the prompts and answers of this suite's runs instead.")
    ),
]
_Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=("The first model's precision. Default: its name's, else fp16.")
    ),
]
_MaxWindows = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Compare only the first N windows.")
]


def divergence(
    model: ModelName,
    engine: EngineOptions,
    second: _Second = None,
    text: _Text = None,
    window: _Window = None,
    suite: _Suite = None,
    output_path: OutputPath = DEFAULT_OUTPUT,
    baseline: _Baseline = None,
    max_windows: _MaxWindows = None,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Also compare the hidden states after every layer.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure how far other precisions, or a second model, are from FP16: KL divergence, same top
    token, perplexity.

    It compares on a text, or on the tokens that make the scores of a suite: the answers of the
    first model's runs, or what these runs scored. Windows of a text do not overlap, have no BOS
    token, and their first tokens are not scored.
    Without a second model, --precision may name several, with commas between; 4bit is the default,
    and fp16 alone gives the perplexity of the text. They compute one after the other, while the
    first one's logits are on the disk.

    Example:
      flexgen-helm divergence smollm2-135m-instruct-q4_1 \\
        --text book.txt --window 1024 --precision 8bit,4bit
    """
    check_engine_flags(engine)
    if rank_of_process() is not None:
        raise UsageError(
            "two models are compared in one process; start divergence without torchrun"
        )
    named = _compared(model, second, baseline, engine.get("precision"))
    of_text = {"--text": text, "--window": window, "--max-windows": max_windows}
    if suite is not None:
        if given := [flag for flag, value in of_text.items() if value is not None]:
            raise UsageError(f"--suite and {given[0]} exclude each other; leave one of them out")
        if len(named) < 2:
            raise UsageError(
                f"--precision names only the baseline {named[0][2]}; add one, such as --precision "
                "4bit"
            )
        by_entry = _suite_prompts(model, named[0][2], output_path / "runs" / suite)
    elif text is None or window is None:
        raise UsageError(
            "divergence needs a text and its --window, or a --suite; see flexgen-helm divergence "
            "--help"
        )
    else:
        content = _read_text(text)

    from flexgen_helm.engine.divergence import require_comparable
    from flexgen_helm.engine.opening import open_files
    from flexgen_helm.report.scores import finite

    models = [
        (label, name, EngineConfig(**{**resolve(name).options, **engine, "precision": precision}))
        for label, name, precision in named
    ]
    opened = models if second else models[:1]
    files = [open_files(resolve(name), options) for _, name, options in opened]
    if second is not None:
        require_comparable(files, by_layer)
    if suite is None:
        by_entry = {"": _windows(model, *files[0], content, window or 0, max_windows)}
    if len(models) == 1:
        return _say_perplexity_of(models[0], by_entry[""], as_json)
    found = _divergences(models, by_entry, files[0][0], by_layer, is_told=not as_json)
    if as_json:
        entries = [
            {"entry": entry, "precisions": [*map(asdict, of)]} for entry, of in found.items()
        ]
        asked = {"text": str(text), "window": window, "precisions": entries[0]["precisions"]}
        print_json(
            finite(
                {
                    "model": model,
                    **(asked if suite is None else {"suite": suite, "entries": entries}),
                }
            )
        )


def _compared(
    model: str, second: str | None, baseline: str | None, asked: str | None
) -> list[tuple[str, str, str]]:
    """Return label, name and precision of all that is compared, the baseline first."""
    first = _named(model, baseline or (None if second else "fp16"))
    if second is not None:
        return [first, _named(second, asked)]
    precisions = dict.fromkeys((first[2], *split_precisions(str(asked or "4bit"))))
    return [(precision, model, precision) for precision in precisions]


def _say_perplexity_of(model: _Model, prompts: ComparedPrompts, as_json: bool) -> None:
    from flexgen_helm.engine.divergence import score
    from flexgen_helm.engine.engine import Engine

    _, name, options = model
    with Engine.from_config(name, options) as loaded:
        say_perplexity(score(loaded, prompts), as_json)


def _divergences(
    models: Sequence[_Model],
    by_entry: Mapping[str, ComparedPrompts],
    checkpoint: Checkpoint,
    by_layer: bool,
    is_told: bool,
) -> dict[str, list[Divergence]]:
    """Compute the baseline, and then each other model beside its rows.

    is_told: print each divergence as soon as it is there.
    """
    from flexgen_helm.engine.divergence import Baseline
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.report.divergence import divergence_between

    (first, name, options), *others = models
    found: dict[str, list[Divergence]] = {entry: [] for entry in by_entry}
    base = Baseline(
        [*by_entry.values()], checkpoint.config, options, by_layer, checkpoint.fingerprint
    )
    with Engine.from_config(name, base.beside(options)) as loaded:
        base.fill(loaded)
    for label, name, options in others:
        with Engine.from_config(name, base.beside(options)) as loaded:
            parts = base.compare(loaded)
        for (entry, prompts), part in zip(by_entry.items(), parts):
            one = divergence_between(first, label, _scored(prompts, part), part.layers)
            found[entry].append(one)
            if is_told:
                between = "\n" * (sum(map(len, found.values())) > 1)
                print(between + divergence_text(one, entry), flush=True)
    base.remove()
    return found


def _scored(prompts: ComparedPrompts, compared: Compared) -> ScoredTokens:
    import numpy as np

    from flexgen_helm.report.divergence import ScoredTokens

    _, documents = np.unique([*map(str, prompts.documents)], return_inverse=True)
    return ScoredTokens(np.repeat(documents, [*map(len, prompts.compared)]), *compared.values)


def say_perplexity(logprobs: NDArray[np.float64], as_json: bool) -> None:
    """Print {tokens_scored, nll, perplexity}; `nll` is the total in nats. Infinite is what no float
    can hold.
    """
    nll = -math.fsum(logprobs)
    perplexity = math.exp(nll / len(logprobs)) if nll < 709 * len(logprobs) else math.inf
    if as_json:
        from flexgen_helm.report.scores import finite

        print_json(finite({"tokens_scored": len(logprobs), "nll": nll, "perplexity": perplexity}))
    else:
        print(
            f"perplexity {perplexity:.4f} over {count(len(logprobs), 'token')} "
            f"(total negative log-likelihood {nll:.3f} nats)"
        )


def _windows(
    name: str,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    text: str,
    window: int,
    most: int | None,
) -> ComparedPrompts:
    """Return the windows of a text. The last may be shorter; a single token cannot be scored.

    Raises `UsageError` if the window exceeds the model's or the text has no token to score.
    """
    if tokenizer is None:
        raise UsageError(f"the model {name} has no tokenizer files, so it cannot read a text")
    if window > checkpoint.config.max_positions:
        raise UsageError(
            f"--window {window} is beyond the {checkpoint.config.max_positions} positions of {name}"
        )
    from flexgen_helm.engine.divergence import ComparedPrompts

    ids = tokenizer.encode(text, add_special_tokens=False)
    windows = [ids[first : first + window] for first in range(0, len(ids) - 1, window)][:most]
    if not windows:
        raise UsageError("the text has fewer than 2 tokens, so there is nothing to score")
    return ComparedPrompts(windows, [range(1, len(ids)) for ids in windows], range(len(windows)))


def _read_text(path: Path) -> str:
    """Return the text that --text names. Raises `UsageError`."""
    try:
        return read_input("--text", path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path} is not UTF-8: {error}") from error


def _named(model: str, asked: str | None) -> tuple[str, str, str]:
    """Return what a model is called in the output, its name, and its precision.

    Raises `UsageError` for another precision than its name means.
    """
    meant = resolve(model).options.get("precision")
    if meant is not None and asked not in (None, meant):
        raise UsageError(
            f"the name {model} already means {meant}, and {asked} is asked for; give the model's "
            "own name"
        )
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
        raise UsageError(
            f"the suite in {suite} has no run of {name} in {baseline}; in {baseline} it has {there}"
        )
    from flexgen_helm.plugin.run_answers import read_compared_prompts  # imports HELM

    found = {run.entry: read_compared_prompts(run) for run in runs}
    for entry in [entry for entry, prompts in found.items() if not any(prompts.compared)]:
        say(f"{entry}: no answer has a token to compare, so it is left out")
        del found[entry]
    if not found:
        raise UsageError(f"no answer of {name} in {suite} has a token to compare")
    return found


def divergence_text(found: Divergence, entry: str = "") -> str:
    """Return a divergence as text for people; entry: the run entry that was compared, "" for a
    text.
    """
    row = "  {:22}{:>9}  {:>21}{:>11}{:>11}{:>11}".format

    def spread(title: str, of: TokenStatistics) -> str:
        interval = "" if of.interval is None else f"{of.interval[0]:.6f} … {of.interval[1]:.6f}"
        mean, *quantiles = (f"{value:.6f}" for value in (of.mean, of.median, of.p99, of.largest))
        return row(title, mean, interval, *quantiles)

    lines = [
        f"{entry + ': ' if entry else ''}{found.precision} against {found.baseline}: "
        f"{count(found.tokens, 'token')} in "
        f"{count(found.documents, 'instance' if entry else 'window')}",
        f"  perplexity {found.perplexity:.4f}, {found.ratio:.4f} times "
        f"{found.baseline_perplexity:.4f}"
        + (
            ""
            if found.interval is None
            else f" (95 %: {found.interval[0]:.4f} to {found.interval[1]:.4f})"
        ),
        f"  same top token at {found.same_top:.2%}",
        row("nats", "mean", "95 % interval", "median", "99 %", "largest"),
        spread("KL divergence", found.kl),
        spread("|log-probability|", found.logprob),
    ]
    if found.layers is not None:
        names = ["embedding", *(f"layer {number}" for number in range(1, len(found.layers)))]
        largest = max(found.layers) or 1.0
        rows = [
            (name, f"{error:.6f}", "█" * round(20 * error / largest))
            for name, error in zip(names, found.layers)
        ]
        lines.append(table_text(["after", "error", "of the largest"], rows, 80))
    return "\n".join(lines)
