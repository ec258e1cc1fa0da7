"""`flexgen-helm verify`: a random part of finished answers, computed again and compared."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from flexgen_helm.checkpoint import known_names, names, suffixes
from flexgen_helm.checkpoint.local_files import local_weights
from flexgen_helm.cli.arguments import DEFAULT_OUTPUT, JsonFlag, OutputPath, require_folder
from flexgen_helm.cli.batch import recorded_lines
from flexgen_helm.cli.completion import complete_model
from flexgen_helm.cli.console import print_json, say
from flexgen_helm.cli.engine_flags import check_engine_flags
from flexgen_helm.cli.lone_service import LoneService
from flexgen_helm.cli.serve import require_lm_eval
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import append, count
from flexgen_helm.harnesses.plain_transformers import by_transformers
from flexgen_helm.locks import written_whole
from flexgen_helm.progress import ProgressPhase, report, silenced
from flexgen_helm.report.verification import (
    BundledAnswer,
    Recorded,
    RecordedAnswer,
    SampleManifest,
    ScoreCheck,
    Source,
    compare_answers,
    draw,
    packed_bundle,
    plain_result,
    read_bundle,
    share_above,
    short,
    upper_bound,
)
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import (
    ModelArguments,
    fetch_model,
    model_arguments,
    read_generation,
)
from flexgen_helm.service.service import KeyedRequest, Service, request_key
from flexgen_helm.terminal import fill_for

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

# An answer that was computed again, as --json prints it; a tolerance of 0 asks for equal bits.
Checked = dict[str, Any]
TOLERANCE = 1e-4
TRANSFORMERS_TOLERANCE = 1e-3
# What of a record decides bits, beside the fingerprint.
_KIND = ("device", "name", "compute_dtype", "product_library", "switched_off", "loops", "torch")
_COMMIT = re.compile(r"(.+)@([0-9a-f]{40})")
# A bound above it says little.
_LITTLE = 0.2
# Sentences that are shown on scores.
_SHOWN = 5


_Answers = Annotated[
    str,
    typer.Argument(
        metavar="SUITE|FILE", help="A suite's name, what batch or lm-eval wrote, or a bundle."
    ),
]
_Requests = Annotated[
    Path | None, typer.Option(metavar="IN.jsonl", help="What FILE answers, of flexgen-helm batch.")
]
_Sample = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE%|N", help="Answers to draw. Default: 1%, at least 20; of a bundle all."
    ),
]
_Reference = Annotated[
    Literal["transformers"] | None,
    typer.Option(
        "--with", metavar="transformers", help="Compare with plain transformers, in float32."
    ),
]
_Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The model as it is named here.", autocompletion=complete_model
    ),
]
_Bundle = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl.zst",
        help="Write the sample for others to check.",
        callback=require_folder,
    ),
]


def verify(
    suite: _Answers,
    engine: EngineOptions,
    output_path: OutputPath = DEFAULT_OUTPUT,
    requests: _Requests = None,
    sample: _Sample = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Which answers are drawn.")] = 0,
    reference: _Reference = None,
    model: _Model = None,
    bundle: _Bundle = None,
    as_json: JsonFlag = False,
) -> None:
    """Compute scores from the answers of a suite or file again, and a random part of the answers,
    and compare.

    Of a run with --batch-invariant, on a machine of the same kind, answers must be equal to the
    bit, else log-probabilities within 0.0001. The exit code is 1 if something differs. Flags of
    prompts and of the engine that a run was given need not be given again, but for
    --generation-config and --unverified.

    Of lm-eval FILE is results_….json, written with --log_samples.

    Example:
      flexgen-helm verify mine --sample 5% --bundle mine.jsonl.zst
      flexgen-helm verify answers.jsonl --requests requests.jsonl
    """
    check_engine_flags(engine)
    path = Path(suite)
    recorded, manifest, skipped = _read(path, output_path, requests)
    if manifest is not None and bundle is not None:
        raise UsageError(
            "--bundle writes a sample of a suite or of a file of answers, and this is a bundle"
        )
    is_bundle = manifest is not None
    opened: AbstractContextManager[FileIO | None] = nullcontext()
    if bundle is not None:
        opened = written_whole(bundle, "--bundle")
    with opened as output:
        drawn = draw(recorded, sample or ("100%" if manifest else None), seed)
        manifest = replace(
            manifest or SampleManifest(path.name, drawn.population, seed, []),
            sources=drawn.sources,
        )
        models = _find_models(drawn.sources, model, engine, is_bundle)
        scores = _check_scores(recorded, models, skipped)
        answered = []
        for pair in _check(manifest.sources, models, drawn.answers, reference is not None):
            answered.append(pair)
            report(ProgressPhase("verify", "", len(answered), len(drawn.answers), "answer"))
        checked, bundled = zip(*answered)
        different = [answer for answer in checked if not answer["equal"]]
        _say(checked, manifest, scores, is_bundle, as_json)
        if different or (scores and scores.differences):
            if bundle is not None:
                say(f"{bundle} is not written, because something differs")
            raise typer.Exit(1)
        if output is not None:
            append(
                output, packed_bundle(manifest, sorted(bundled, key=lambda answer: answer.number))
            )
    if bundle is not None:
        say(f"{bundle} is written")


def _say(
    checked: Sequence[Checked],
    manifest: SampleManifest,
    scores: ScoreCheck | None,
    is_bundle: bool,
    as_json: bool,
) -> None:
    """Print what was found."""
    from flexgen_helm.report.scores import finite

    different = [answer for answer in checked if not answer["equal"]]
    bound = upper_bound(len(different), len(checked), manifest.population)
    if as_json:
        print_json(
            finite(
                {
                    "suite": manifest.suite,
                    "population": manifest.population,
                    "drawn": len(checked),
                    "different": len(different),
                    "bound": bound,
                    "scores": scores and vars(scores),
                    "answers": checked,
                }
            )
        )
    else:
        is_wrong = different or (scores and scores.differences)
        is_partial = scores and scores.unchecked
        verdict = (
            "failed" if is_wrong else "passed, as far as it was checked" if is_partial else "passed"
        )
        lines = [
            f"{verdict}: {_sentence(checked, bound, manifest, is_bundle)}",
            *map(_describe, different),
            *_on_scores(scores, len(manifest.sources)),
        ]
        print(fill_for(sys.stdout, "\n".join(lines)))


def _read(
    path: Path, output_path: Path, requests: Path | None
) -> tuple[list[Recorded], SampleManifest | None, Sequence[str]]:
    """Return what has answers: runs of a suite, or a file; a bundle's manifest; names of runs that
    are left out.
    """
    if not path.is_file():
        from flexgen_helm.plugin.run_answers import recorded_runs  # imports HELM

        recorded, skipped = recorded_runs(output_path / "runs" / path)
        return recorded, None, skipped
    if requests is not None:
        return [recorded_lines(path, requests)], None, ()
    if path.suffix == ".json":
        require_lm_eval()
        from flexgen_helm.harnesses.lm_eval_verification import recorded_answers

        return [recorded_answers(path)], None, ()
    manifest, answers = read_bundle(path)
    return _of_bundle(path, manifest, answers), manifest, ()


def _of_bundle(
    path: Path, manifest: SampleManifest, answers: Sequence[BundledAnswer]
) -> list[Recorded]:
    def as_recorded(answer: BundledAnswer) -> RecordedAnswer:
        def recompute(service: Service, model: ModelArguments) -> list[Any]:
            keyed = (KeyedRequest(request, request_key(request)) for request in answer.requests)
            return [plain_result(service.respond(model, request).result) for request in keyed]

        return RecordedAnswer(answer.name, answer.results, recompute)

    return [
        Recorded(
            path,
            "verify",
            vars(source),
            [as_recorded(answer) for answer in answers if answer.source == index].copy,
        )
        for index, source in enumerate(manifest.sources)
    ]


def _check_scores(
    recorded: Sequence[Recorded], models: Sequence[ModelArguments], skipped: Sequence[str]
) -> ScoreCheck | None:
    """Return what is wrong with all scores; None where there are none. skipped: names of runs that
    have none.
    """
    check = ScoreCheck(
        [], [f"{name}, which is not finished or of another client" for name in skipped]
    )
    parts = [
        (part, model) for part, model in zip(recorded, models) if part.check_scores is not None
    ]
    for number, (part, model) in enumerate(parts, 1):
        assert part.check_scores is not None
        with silenced():
            checked_part = part.reading(partial(part.check_scores, model))
        check.differences.extend(checked_part.differences)
        check.unchecked.extend(checked_part.unchecked)
        report(ProgressPhase("verify", "scores", number, len(parts), "run"))
    return check if parts else None


def _find_models(
    sources: Sequence[Source], model: str | None, engine: EngineOptions, is_bundle: bool
) -> list[ModelArguments]:
    """Return the model of each record; the arguments are those of `_find_model`."""
    try:
        return [_find_model(source, model, engine, is_bundle) for source in sources]
    except UsageError as error:
        if not is_bundle or model is not None:
            raise
        raise FlexgenError(f"the bundle is not confirmed: {error}") from None


def _find_model(
    source: Source, model: str | None, engine: EngineOptions, is_bundle: bool
) -> ModelArguments:
    """Return the model of a run's record, as it was asked for; model: where it is here, None for
    its name.
    """
    from flexgen_helm.engine.device import compute_device

    name, revision = suffixes.without_digest(source.model), None
    chat = {} if is_bundle else source.chat_template or {}  # a bundle's prompts are token ids
    device = engine.get("device", "auto")
    options = {
        "precision": source.precision,
        "apply_chat_template": chat.get("applied"),
        "chat_template_kwargs": chat.get("kwargs"),
        "system_prompt": chat.get("system_prompt"),
        "thinking_budget": chat.get("thinking_budget"),
        # A GPU refuses the option, and is another kind of processor anyway.
        "batch_invariant": bool(source.batch_invariant)
        and device != "sim"
        and compute_device(device).type == "cpu",
        **engine,
    }
    if model is None:
        resolved = names.resolve(name)
        commit = _COMMIT.fullmatch(source.origin or "")
        if commit and commit[1] == resolved.hub_repo:
            revision = commit[2]
            resolved = replace(resolved, revision=revision)
        is_known = resolved.path is None or not {name, suffixes.base_name(name)}.isdisjoint(
            known_names.read_user_models()
        )
        if is_bundle and not (is_known and local_weights(resolved)):
            raise UsageError(
                f"the bundle's model {short(name)} from {short(source.origin)} is not on this "
                "machine by that name; fetch it with flexgen-helm fetch, or say with --model where "
                "it is"
            )
    return model_arguments(model or name, options, revision)


class _Recomputed(NamedTuple):
    """An answer that was computed again.

    computed: what `answer.recompute` returned. prompt: its text, of the
        first request.
    """

    answer: RecordedAnswer
    service: LoneService
    computed: Any
    prompt: str

    def bundled(self) -> BundledAnswer:
        requests, results = [*zip(*self.service.answers.values())] or [(), ()]
        return BundledAnswer(
            self.answer.source,
            self.answer.number,
            self.answer.name,
            requests,
            [*map(plain_result, results)],
        )

    def checked(self, tolerance: float, why: str, contradiction: str = "") -> Checked:
        answer = self.answer
        differences, largest = compare_answers(
            answer.recorded, self.computed, tolerance, answer.has_sums
        )
        if contradiction:
            differences += [("draw", "the most probable token", contradiction)]
        return {
            "name": answer.name,
            "prompt": self.prompt,
            "equal": not differences,
            "differences": differences,
            "largest_difference": largest,
            "tolerance": tolerance,
            "has_sums": answer.has_sums,
            "why": why,
        }


def _check(
    sources: list[Source],
    models: Sequence[ModelArguments],
    drawn: Sequence[RecordedAnswer],
    by_both: bool,
) -> Iterator[tuple[Checked, BundledAnswer]]:
    """Compute each answer alone; by_both: and have `transformers` score it.

    sources: of the answers' runs; becomes what they were computed with here.
    Raises `UsageError` for a model that is not the recorded one, and for what `transformers` does
    not compute.
    """
    for key in dict.fromkeys(models[answer.source].engine_key for answer in drawn):
        folder = _folder_for_transformers(key) if by_both else None
        of_model = {index for index, model in enumerate(models) if model.engine_key == key}
        answers = [answer for answer in drawn if answer.source in of_model]
        recomputed = []
        with EngineLoader().load(key) as engine:
            tokenizer = engine.tokenizer
            assert tokenizer is not None
            for source in of_model:
                _require_fingerprint(sources[source], engine, key)
            for answer in answers:
                again = _recompute(engine, answer, models[answer.source])
                if folder is None:
                    why = _another_kind(sources[answer.source], engine)
                    yield again.checked(TOLERANCE if why else 0.0, why), again.bundled()
                else:
                    recomputed.append(again)
            computed_with = {
                name: engine.last_run[name]
                for name in ("fingerprint", "hardware", "versions", "batch_invariant")
            }
            for source in of_model:
                sources[source] = replace(sources[source], **computed_with)
        if folder is not None:
            yield from _check_by_transformers(folder, tokenizer.eos_ids, recomputed, models)


def _recompute(engine: Engine, answer: RecordedAnswer, model: ModelArguments) -> _Recomputed:
    service = LoneService(engine)
    with silenced():
        computed = answer.recompute(service, model)
    results = [result for _, result in service.answers.values()]
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.decode(results[0].prompt_token_ids) if results else ""
    return _Recomputed(answer, service, computed, prompt)


def _check_by_transformers(
    folder: Path,
    ends: Collection[int],
    recomputed: Sequence[_Recomputed],
    models: Sequence[ModelArguments],
) -> Iterator[tuple[Checked, BundledAnswer]]:
    """Compare with what `transformers` makes of the same tokens."""
    pairs = [pair for again in recomputed for pair in again.service.answers.values()]
    scored = by_transformers(folder, ends, pairs, TRANSFORMERS_TOLERANCE)
    for again in recomputed:
        bundled, contradictions = again.bundled(), []
        for key in again.service.answers:
            rescored = next(scored)
            again.service.answers[key] = rescored.request, rescored.result
            contradictions.append(rescored.contradiction)
        computed = again.answer.recompute(again.service, models[again.answer.source])
        by_both = again._replace(computed=computed)
        why, first = "by transformers in float32", next(filter(None, contradictions), "")
        yield by_both.checked(TRANSFORMERS_TOLERANCE, why, first), bundled


def _require_fingerprint(source: Source, engine: Engine, model: ModelArguments) -> None:
    from flexgen_helm.engine.opening import fingerprint_elsewhere

    recorded, bits = source.fingerprint, source.batch_invariant or ()
    if recorded == engine.fingerprint:
        return
    device, dtype = (str((source.hardware or {}).get(key)) for key in ("device", "compute_dtype"))
    if recorded != fingerprint_elsewhere(model.path, model.config, device, dtype, bits):
        raise FlexgenError(
            f"{short(source.model)} in {source.precision} has the fingerprint {recorded[:12]!r} in "
            f"the record and {engine.fingerprint[:12]!r} here: other weights, another tokenizer, "
            "other settings, or another version than "
            f"{short((source.versions or {}).get('flexgen-helm'))}; name the right one with --model"
        )


def _another_kind(source: Source, engine: Engine) -> str:
    """Return what of the record is not so here, and decides bits; "" if nothing is."""
    if not source.batch_invariant:
        return "the run had no --batch-invariant, so its bits may follow its batches"
    if source.batch_invariant != engine.last_run["batch_invariant"]:
        return "another kind of processor, or another release of flexgen-helm"
    recorded = {**(source.hardware or {}), **(source.versions or {})}
    computed_with = {**engine.last_run["hardware"], **engine.last_run["versions"]}
    for key in _KIND:
        old, new = recorded.get(key), computed_with[key]
        if key == "loops" and isinstance(old, dict):  # one that was not needed is not in the record
            old, new = {**new, **old}, {**old, **new}
        if old != new:
            return f"{key}: {short(old)} in the record, {short(new)} here"
    return ""


def _folder_for_transformers(model: ModelArguments) -> Path:
    """Return the folder of a model. Raises `UsageError` for one that `transformers` does not
    compute.
    """
    folder = fetch_model(model)
    for reason, is_so in (
        (f"{model.config.precision} is another model", model.config.precision != "fp16"),
        ("it reads folders of safetensors", not folder.is_dir()),
        ("settings of the model's folder change answers", read_generation(model).applied),
        ("a budget cuts its thinking", model.config.thinking_budget is not None),
    ):
        if is_so:
            raise UsageError(
                f"{model.name} cannot be computed with transformers: {reason}; leave --with out"
            )
    return folder


def _describe(checked: Checked) -> str:
    """Return an answer that differs as text for people."""
    where, old, new = checked["differences"][0]
    return (
        f"{short(checked['name'])} differs at {short(where)}, numbers by up to "
        f"{checked['largest_difference']:.3g}\n"
        f"  prompt    {short(checked['prompt'], 66)}\n"
        f"  recorded  {short(old, 66)}\n"
        f"  computed  {short(new, 66)}"
    )


def _on_scores(found: ScoreCheck | None, parts: int) -> list[str]:
    """Return lines on what was found in the scores of so many runs or files."""
    if found is None:
        return []
    wrong, lines = found.differences, found.differences[:_SHOWN]
    if len(wrong) > _SHOWN:
        lines.append(f"… and {len(wrong) - _SHOWN:,} more")
    if not wrong:
        lines.append(
            f"scores, questions and references of {count(parts, 'run')}, made again, are equal"
        )
    return [*lines, *(f"not checked: {what}" for what in found.unchecked)]


def _sentence(
    checked: Sequence[Checked], bound: float, manifest: SampleManifest, is_bundle: bool
) -> str:
    parts, population = [], f"the {manifest.population:,} answers of {short(manifest.suite)}"
    for why in dict.fromkeys(answer["why"] for answer in checked):
        alike = [answer for answer in checked if answer["why"] == why]
        largest = max(answer["largest_difference"] for answer in alike)
        per_sum = " of each sum" if any(answer["has_sums"] for answer in alike) else ""
        way = (
            f"within {alike[0]['tolerance']:g}{per_sum} ({why}; the largest difference is "
            f"{largest:.2g})"
        )
        equal = sum(answer["equal"] for answer in alike)
        parts.append(f"{equal:,} of {len(alike):,} answers equal {way if why else 'to the bit'}")
    if is_bundle:
        parts.append(
            f"who wrote the bundle chose them and says that they are of {population}, whose scores "
            "it has not"
        )
        return "; ".join(
            [
                *parts,
                f"if drawn at random, with 95 % confidence at most {share_above(bound)} differ",
            ]
        )
    if len(checked) == manifest.population:
        return "; ".join([*parts, f"these are all of {population}"])
    few = "; --sample 100% checks all" if bound > _LITTLE else ""
    return "; ".join(
        [*parts, f"with 95 % confidence at most {share_above(bound)} of {population} differ{few}"]
    )
