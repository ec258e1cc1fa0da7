"""`flexgen-helm divergence`: a model's perplexity on a text, and how far precisions or a second
model are from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.suffixes import PREFIX
from flexgen_helm.cli.arguments import DEFAULT_OUTPUT, JsonFlag, ModelName, OutputPath
from flexgen_helm.cli.completion import complete_model
from flexgen_helm.cli.console import print_json, read_input, say
from flexgen_helm.cli.engine_flags import check_engine_flags
from flexgen_helm.config import EngineConfig, EngineOptions
from flexgen_helm.engine.rank import rank_of_process
from flexgen_helm.errors import UsageError
from flexgen_helm.quant.precisions import precision_named, split_precisions
from flexgen_helm.units import count

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flexgen_helm.checkpoint.checkpoint import Checkpoint
    from flexgen_helm.engine.compared_prompts import ComparedPrompts
    from flexgen_helm.engine.divergence import Compared
    from flexgen_helm.report.divergence import Divergence, ScoredTokens
    from flexgen_helm.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class ComparedModel:
    """A model in a precision.

    label: its name in the output.
    name: of the model, as it was given.
    precision: the precision's name.
    """

    label: str
    name: str
    precision: str
    options: EngineConfig


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
        metavar="NAME", help="Compare on the prompts and answers of this suite's runs instead."
    ),
]
_Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The first model's precision. Default: fp16; beside MODEL2 its name's, else fp16.",
    ),
]
_MaxWindows = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Compare only the first N windows.")
]
_ByLayer = Annotated[
    bool, typer.Option("--by-layer", help="Also compare the hidden states after every layer.")
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
    by_layer: _ByLayer = False,
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
    models = _compared(model, second, baseline, engine)
    if suite is not None:
        _check_suite({"--text": text, "--window": window, "--max-windows": max_windows}, models)
        by_entry = _prompts_of_suite(model, models[0].precision, output_path / "runs" / suite)
    elif text is None or window is None:
        raise UsageError(
            "divergence needs a text and its --window, or a --suite; see flexgen-helm divergence "
            "--help"
        )
    else:
        content = _read_text(text)

    from flexgen_helm.engine.compared_prompts import score
    from flexgen_helm.engine.divergence import require_comparable
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.engine.opening import open_files

    opened = models if second else models[:1]
    files = [open_files(resolve(compared.name), compared.options) for compared in opened]
    if second is not None:
        require_comparable(files, by_layer)
    if text is not None and window is not None:
        by_entry = {"": _prompts_of_text(model, files[0], content, window, max_windows)}
    if len(models) == 1:
        with Engine.from_config(model, models[0].options) as loaded:
            return print_perplexity(score(loaded, by_entry[""]), as_json)
    divergences = _divergences(models, by_entry, files[0][0], by_layer, prints=not as_json)
    if as_json:
        text_or_suite = {"text": str(text), "window": window} if suite is None else {"suite": suite}
        _print_divergences({"model": model, **text_or_suite}, divergences)


def _print_divergences(
    subject: Mapping[str, Any], divergences: Mapping[str, Sequence[Divergence]]
) -> None:
    """Print divergences as JSON.

    subject: the model, and the text or suite.
    divergences: by run entry; "" for a text.
    """
    precisions = {entry: [*map(asdict, models)] for entry, models in divergences.items()}
    if "" in precisions:
        _print_json({**subject, "precisions": precisions[""]})
    else:
        entries = [{"entry": entry, "precisions": rows} for entry, rows in precisions.items()]
        _print_json({**subject, "entries": entries})


def _check_suite(text_flags: Mapping[str, object], models: Sequence[ComparedModel]) -> None:
    """Raise `UsageError` for flags of a text beside a suite, and where nothing is compared."""
    for flag, value in text_flags.items():
        if value is not None:
            raise UsageError(f"--suite and {flag} exclude each other; leave one of them out")
    if len(models) < 2:
        raise UsageError(
            f"--precision names only the baseline {models[0].precision}; add one, such as "
            "--precision 4bit"
        )


def _print_json(content: Mapping[str, Any]) -> None:
    """Print an object; numbers that no float holds are null."""
    from flexgen_helm.report.scores import finite

    print_json(finite(content))


def _compared(
    model: str, second: str | None, baseline: str | None, engine: EngineOptions
) -> list[ComparedModel]:
    """Return all that is compared, the baseline first."""
    precision = engine.get("precision")
    first = _named(model, baseline or (None if second else "fp16"), engine)
    if second is not None:
        return [first, _named(second, precision, engine)]
    precisions = dict.fromkeys((first.precision, *split_precisions(str(precision or "4bit"))))
    return [ComparedModel(name, model, name, _options(model, name, engine)) for name in precisions]


def _named(model: str, precision: str | None, engine: EngineOptions) -> ComparedModel:
    """Return a model in a precision, None for that of its name.

    Raises `UsageError` for a precision that its name contradicts.
    """
    meant = resolve(model).options.get("precision")
    if meant is not None and precision not in (None, meant):
        raise UsageError(
            f"the name {model} already means {meant}, and {precision} is asked for; give the "
            "model's own name"
        )
    label = model.removeprefix(PREFIX) + (f"-{precision}" if precision else "")
    named = precision_named(precision or meant or "fp16").name
    return ComparedModel(label, model, named, _options(model, named, engine))


def _options(model: str, precision: str, engine: EngineOptions) -> EngineConfig:
    return EngineConfig(**{**resolve(model).options, **engine, "precision": precision})


def _divergences(
    models: Sequence[ComparedModel],
    by_entry: Mapping[str, ComparedPrompts],
    checkpoint: Checkpoint,
    by_layer: bool,
    prints: bool,
) -> dict[str, list[Divergence]]:
    """Compute the first model, the baseline, and compare the others with it, one after the other.

    by_entry: prompts by run entry; "" for a text.
    checkpoint: the baseline's.
    prints: print each divergence as soon as it is there.
    Returns the divergences of the other models, by run entry.
    """
    from flexgen_helm.engine.baseline import Baseline
    from flexgen_helm.engine.divergence import compare
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.report.divergence import divergence_between, divergence_text

    first = models[0]
    divergences: dict[str, list[Divergence]] = {entry: [] for entry in by_entry}
    baseline = Baseline(
        [*by_entry.values()], checkpoint.config, first.options, by_layer, checkpoint.fingerprint
    )
    with Engine.from_config(first.name, baseline.beside(first.options)) as loaded:
        baseline.fill(loaded)
    for model in models[1:]:
        with Engine.from_config(model.name, baseline.beside(model.options)) as loaded:
            compared = compare(baseline, loaded)
        for (entry, prompts), part in zip(by_entry.items(), compared):
            scored = _scored(prompts, part)
            divergence = divergence_between(first.label, model.label, scored, part.layers)
            if prints:
                is_first = not any(divergences.values())
                text = divergence_text(divergence, entry)
                print(text if is_first else f"\n{text}", flush=True)
            divergences[entry].append(divergence)
    baseline.remove()
    return divergences


def _scored(prompts: ComparedPrompts, compared: Compared) -> ScoredTokens:
    """Return the compared tokens with the number of the document that each is of."""
    import numpy as np

    from flexgen_helm.report.divergence import ScoredTokens

    _, documents = np.unique([*map(str, prompts.documents)], return_inverse=True)
    return ScoredTokens(np.repeat(documents, [*map(len, prompts.compared)]), *compared.values)


def print_perplexity(logprobs: NDArray[np.float64], as_json: bool) -> None:
    """Print {tokens_scored, nll, perplexity}; `nll` is the total in nats. Infinite is what no float
    can hold.
    """
    from flexgen_helm.report.divergence import perplexity_of

    nll, perplexity = -math.fsum(logprobs), perplexity_of(logprobs)
    if as_json:
        _print_json({"tokens_scored": len(logprobs), "nll": nll, "perplexity": perplexity})
    else:
        print(
            f"perplexity {perplexity:.4f} over {count(len(logprobs), 'token')} "
            f"(total negative log-likelihood {nll:.3f} nats)"
        )


def _prompts_of_text(
    name: str,
    files: tuple[Checkpoint, Tokenizer | None],
    text: str,
    window: int,
    max_windows: int | None,
) -> ComparedPrompts:
    """Return the windows of a text. The last may be shorter; a single token cannot be scored.

    Raises `UsageError` if the window exceeds the model's or the text has no token to score.
    """
    checkpoint, tokenizer = files
    if tokenizer is None:
        raise UsageError(f"the model {name} has no tokenizer files, so it cannot read a text")
    if window > checkpoint.config.max_positions:
        raise UsageError(
            f"--window {window} is beyond the {checkpoint.config.max_positions} positions of {name}"
        )
    from flexgen_helm.engine.compared_prompts import ComparedPrompts

    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = range(0, len(ids) - 1, window)[:max_windows]
    if not starts:
        raise UsageError("the text has fewer than 2 tokens, so there is nothing to score")
    windows = [ids[start : start + window] for start in starts]
    return ComparedPrompts(windows, [range(1, len(ids)) for ids in windows], range(len(windows)))


def _read_text(path: Path) -> str:
    """Return the text that --text names. Raises `UsageError`."""
    try:
        return read_input("--text", path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path} is not UTF-8: {error}") from error


def _prompts_of_suite(model: str, baseline: str, suite: Path) -> dict[str, ComparedPrompts]:
    """Return what the runs of a model in the baseline were asked and answered, by run entry.

    Raises `UsageError` without such a run, and what `read_compared_prompts` raises.
    """
    from flexgen_helm.report.scores import read_finished_runs

    name = model.removeprefix(PREFIX).replace("/", "--")
    in_baseline = [run for run in read_finished_runs(suite) if run.precision == baseline]
    runs = [run for run in in_baseline if run.model in (name, resolve(model).name)]
    if not runs:
        known = ", ".join(dict.fromkeys(run.model for run in in_baseline)) or "no run"
        raise UsageError(
            f"the suite in {suite} has no run of {name} in {baseline}; in {baseline} it has {known}"
        )
    from flexgen_helm.plugin.compared_prompts import read_compared_prompts  # imports HELM

    by_entry = {}
    for run in runs:
        prompts = read_compared_prompts(run)
        if any(prompts.compared):
            by_entry[run.entry] = prompts
        else:
            say(f"{run.entry}: no answer has a token to compare, so it is left out")
    if not by_entry:
        raise UsageError(f"no answer of {name} in {suite} has a token to compare")
    return by_entry
