"""`flexgen-helm verify`: a random part of finished answers, computed again and compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexgen_helm.cli.console import print_json, say
from flexgen_helm.cli.engine_flags import (
    DEFAULT_OUTPUT,
    JsonFlag,
    OutputPath,
    check_engine_flags,
    complete_model,
    require_folder,
)
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.progress import ProgressPhase, report, silenced

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine
    from flexgen_helm.report.verification import Answer, DrawnAnswer, Manifest, Source
    from flexgen_helm.service.models import ModelArguments

# An answer that was computed again, as --json prints it; a tolerance of 0 asks for equal bits.
Checked = dict[str, Any]
TOLERANCE = 1e-4
TRANSFORMERS_TOLERANCE = 1e-3
# What of a record decides bits, beside the fingerprint.
_KIND = ("device", "name", "compute_dtype", "product_library", "switched_off", "loops", "torch")
_COMMIT = re.compile(r"(.+)@([0-9a-f]{40})")
# Characters that are shown of a text.
_SHOWN = 90


class Reference(StrEnum):
    transformers = "transformers"


def verify(
    suite: Annotated[str, typer.Argument(metavar="SUITE|FILE", help="A suite's name, or a bundle.")],
    engine: EngineOptions,
    output_path: OutputPath = DEFAULT_OUTPUT,
    sample: Annotated[
        str | None,
        typer.Option(metavar="SHARE%|N", help="Answers to draw. Default: 1%, at least 20; of a bundle all."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Which answers are drawn.")] = 0,
    reference: Annotated[
        Reference | None,
        typer.Option("--with", metavar="transformers", help="Compute with plain transformers, in float32."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The model as it is named here.", autocompletion=complete_model),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="FILE.tar.zst", help="Write the sample for others to check.", callback=require_folder),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute a random part of a suite's answers again, one by one, and compare.

    Of a run with --batch-invariant, on a machine of the same kind, answers must be equal to the bit, else
    log-probabilities within 0.0001. The exit code is 1 if an answer differs. Flags of prompts and of the engine that a
    run was given need not be given again, but for --generation-config and --unverified.

    Example:
      flexgen-helm verify mine --sample 5% --bundle mine.tar.zst
    """
    from flexgen_helm.report.scores import finite, read_finished_runs
    from flexgen_helm.report.verification import Manifest, read_bundle, sample_size, upper_bound, write_bundle

    check_engine_flags(engine)
    is_bundle = Path(suite).is_file()

    def find_model(source: Source) -> ModelArguments:
        return _find_model(source, model, engine, is_bundle)

    if is_bundle:
        import numpy as np

        manifest, drawn = read_bundle(Path(suite))
        size = sample_size(sample or "100%", len(drawn))
        numbers = np.random.default_rng(seed).choice(len(drawn), size, replace=False)
        drawn = [drawn[number] for number in sorted(numbers)]
    else:
        from flexgen_helm.plugin.run_answers import draw_answers  # imports HELM

        sources, drawn, population = draw_answers(
            read_finished_runs(output_path / "runs" / suite), sample, seed, find_model
        )
        manifest = Manifest(suite, population, seed, sources)
    models = [find_model(source) for source in manifest.sources]
    checked: list[Checked] = []
    for answer in (_by_transformers if reference else _by_engine)(manifest.sources, models, drawn):
        checked.append(answer)
        report(ProgressPhase("verify", "", len(checked), len(drawn), "answer"))
    different = [answer for answer in checked if not answer["equal"]]
    bound = upper_bound(len(different), len(drawn), manifest.population)
    if as_json:
        known: dict[str, Any] = {"suite": manifest.suite, "population": manifest.population}
        known |= {"drawn": len(drawn), "different": len(different), "bound": bound, "answers": checked}
        print_json(finite(known))
    else:
        print("\n".join([*map(_describe, different), _sentence(checked, bound, manifest, is_bundle)]))
    if different:
        if bundle is not None:
            say(f"{bundle} is not written, because answers differ")
        raise typer.Exit(1)
    if bundle is not None:
        write_bundle(bundle, manifest, drawn)


def _find_model(source: Source, model: str | None, engine: EngineOptions, is_bundle: bool) -> ModelArguments:
    """Return the model of a run's record, as it was asked for; model: where it is here, None for its name."""
    from flexgen_helm.checkpoint import names
    from flexgen_helm.checkpoint.fetch import local_weights
    from flexgen_helm.plugin.model_names import find_model

    name = names.without_digest(source.model)
    chat = {} if is_bundle else source.chat_template or {}  # a bundle's prompts are token ids
    given = {"path": model, "precision": source.precision, "apply_chat_template": chat.get("applied")}
    given |= {"chat_template_kwargs": chat.get("kwargs") or None, "batch_invariant": bool(source.batch_invariant)}
    given |= {key: chat.get(key) for key in ("system_prompt", "thinking_budget")}
    if model is None:
        resolved = names.resolve(name)
        commit = _COMMIT.fullmatch(source.origin or "")
        if commit and commit[1] == resolved.hub_repo:
            given["revision"] = commit[2]
            resolved = replace(resolved, revision=commit[2])
        is_known = resolved.path is None or not {name, names.base_name(name)}.isdisjoint(names.user_names())
        if is_bundle and not (is_known and local_weights(resolved)):
            raise UsageError(
                f"the bundle's model {_short(name)} from {_short(source.origin)} is not on this machine by that "
                "name; fetch it with flexgen-helm fetch, or say with --model where it is"
            )
    return find_model(name, given, engine)


def _by_model(
    models: Sequence[ModelArguments], drawn: Sequence[DrawnAnswer]
) -> Iterator[tuple[ModelArguments, list[DrawnAnswer]]]:
    """Yield answers by what must be loaded for them; models: of the sources."""
    for model in dict.fromkeys(found.engine_key for found in models):
        if answers := [answer for answer in drawn if models[answer.source].engine_key == model]:
            yield model, answers


def _checked(drawn: DrawnAnswer, prompt: str, computed: Sequence[Answer], tolerance: float, why: str) -> Checked:
    from flexgen_helm.report.verification import is_equal

    same, largest = is_equal(drawn.answers, computed, tolerance)
    compared = {
        "recorded": [*map(asdict, drawn.answers)],
        "computed": [*map(asdict, computed)],
        "tolerance": tolerance,
        "why": why,
    }
    return {"name": drawn.name, "prompt": prompt, "equal": same, "largest_difference": largest, **compared}


def _by_engine(
    sources: Sequence[Source], models: Sequence[ModelArguments], drawn: Sequence[DrawnAnswer]
) -> Iterator[Checked]:
    """Compute each request alone. Raises `UsageError` for a model that is not the recorded one."""
    from flexgen_helm.report.verification import answers_of
    from flexgen_helm.service.loaders import EngineLoader

    for model, answers in _by_model(models, drawn):
        with EngineLoader().load(model) as engine:
            for number in {answer.source for answer in answers}:
                _require_fingerprint(sources[number], engine, model)
            for answer in answers:
                with silenced():
                    (result,) = engine.run([answer.request])
                if result.error is not None or engine.tokenizer is None:
                    raise UsageError(f"{_short(answer.name)} cannot be computed by {model.path}: {result.error}")
                why = _another_kind(sources[answer.source], engine)
                prompt = engine.tokenizer.decode(result.prompt_token_ids)
                computed = answers_of(answer, result, engine.tokenizer)
                yield _checked(answer, prompt, computed, TOLERANCE if why else 0.0, why)


def _require_fingerprint(source: Source, engine: Engine, model: ModelArguments) -> None:
    from flexgen_helm.engine.opening import fingerprint_elsewhere

    recorded, bits = source.fingerprint, source.batch_invariant or ()
    if recorded == engine.fingerprint:
        return
    device, dtype = (str((source.hardware or {}).get(key)) for key in ("device", "compute_dtype"))
    if recorded != fingerprint_elsewhere(model.path, model.config, device, dtype, bits):
        raise UsageError(
            f"{_short(source.model)} in {source.precision} has the fingerprint {str(recorded)[:12]!r} in the record "
            f"and {engine.fingerprint[:12]!r} here: other weights, another tokenizer, other settings, or another "
            f"version than {_short((source.versions or {}).get('flexgen-helm'))}; name the right one with --model"
        )


def _another_kind(source: Source, engine: Engine) -> str:
    """Return what of the record is not so here, and decides bits; "" if nothing is."""
    if not source.batch_invariant:
        return "the run had no --batch-invariant, so its bits may follow its batches"
    if source.batch_invariant != engine.last_run["batch_invariant"]:
        return "another kind of processor, or another release of flexgen-helm"
    there, here = (
        {**(found["hardware"] or {}), **(found["versions"] or {})} for found in (vars(source), engine.last_run)
    )
    for key in _KIND:
        old, new = there.get(key), here[key]
        if key == "loops" and isinstance(old, dict):  # one that was not needed is not in the record
            old, new = {**new, **old}, {**old, **new}
        if old != new:
            return f"{key}: {_short(old)} in the record, {_short(new)} here"
    return ""


def _by_transformers(
    sources: Sequence[Source], models: Sequence[ModelArguments], drawn: Sequence[DrawnAnswer]
) -> Iterator[Checked]:
    """Compute the recorded tokens by `transformers`. Raises `UsageError` for what it does not compute."""
    from flexgen_helm.checkpoint.fetch import fetch
    from flexgen_helm.harnesses.plain_transformers import recomputed
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

    for model, answers in _by_model(models, drawn):
        path = fetch(model.path, model.revision)
        folder = path.parent if path.suffix == ".safetensors" else path
        settings = [(sources[answer.source].generation_config or {}).get("applied") for answer in answers]
        tokenizer = Tokenizer.from_path(folder)
        for reason, is_so in (
            (f"{model.config.precision} is another model", model.config.precision != "fp16"),
            ("transformers reads folders of safetensors, with a tokenizer", not (folder.is_dir() and tokenizer)),
            ("settings of its folder changed answers", any(settings)),
            ("the tokens of its thinking are not recorded", any(answer.request.thinking for answer in answers)),
        ):
            if is_so:
                raise UsageError(f"{model.name} cannot be computed with transformers: {reason}; leave --with out")
        assert tokenizer is not None
        computed = recomputed(folder, tokenizer, answers, TRANSFORMERS_TOLERANCE)
        for answer, found in zip(answers, computed):
            prompt = tokenizer.decode(answer.request.prompt_token_ids or ())
            yield _checked(answer, prompt, found, TRANSFORMERS_TOLERANCE, "by transformers in float32")


def _describe(checked: Checked) -> str:
    """Return an answer that differs as text for people."""
    lines = [f"{_short(checked['name'])} differs, log-probabilities by up to {checked['largest_difference']:.3g}"]
    lines += [f"  prompt    {_short(checked['prompt'])}"]
    for key in ("recorded", "computed"):
        lines += [f"  {key}  {_short(answer['text'])} {_short(answer['end'])}" for answer in checked[key]]
    return "\n".join(lines)


def _short(value: object) -> str:
    shown = repr(value)  # without what a terminal obeys
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def _sentence(checked: Sequence[Checked], bound: float, manifest: Manifest, is_bundle: bool) -> str:
    from flexgen_helm.report.verification import share_above

    parts = []
    for why in dict.fromkeys(answer["why"] for answer in checked):
        alike = [answer for answer in checked if answer["why"] == why]
        largest = max(answer["largest_difference"] for answer in alike)
        way = f"within {alike[0]['tolerance']:g} ({why}; the largest difference is {largest:.2g})"
        equal = sum(answer["equal"] for answer in alike)
        parts.append(f"{equal:,} of {len(alike):,} answers equal {way if why else 'to the bit'}")
    every = f"{manifest.population:,} answers"
    every = f"the {every} of {_short(manifest.suite)}" if is_bundle else f"this suite's {every}"
    if len(checked) == manifest.population:
        return "; ".join([*parts, f"these are all of {every}"])
    return "; ".join([*parts, f"with 95 % confidence at most {share_above(bound)} of {every} differ"])
