"""`flexgen-helm verify`: a random part of finished answers, computed again and compared."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flexgen_helm.checkpoint import known_names, names, suffixes
from flexgen_helm.checkpoint.local_files import local_weights
from flexgen_helm.cli.arguments import DEFAULT_OUTPUT, JsonFlag, OutputPath, require_folder
from flexgen_helm.cli.batch import recorded_lines
from flexgen_helm.cli.completion import complete_model
from flexgen_helm.cli.console import print_json, say
from flexgen_helm.cli.engine_flags import check_engine_flags
from flexgen_helm.cli.lm_eval import require_lm_eval
from flexgen_helm.cli.recompute import Checked, check_answers
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import append
from flexgen_helm.locks import written_whole
from flexgen_helm.progress import ProgressPhase, report, silenced
from flexgen_helm.report.bundles import BundledAnswer, SampleManifest, packed_bundle, read_bundle
from flexgen_helm.report.verification import (
    AnswerFile,
    RecordedAnswer,
    ScoreCheck,
    Source,
    draw,
    plain_result,
    share_above,
    short,
    upper_bound,
)
from flexgen_helm.service.models import ModelArguments, model_arguments
from flexgen_helm.service.service import KeyedRequest, Service, request_key
from flexgen_helm.terminal import fill_for
from flexgen_helm.units import count

# Origin of weights from the hub: repository@commit.
_COMMIT = re.compile(r"(.+)@([0-9a-f]{40})")
# Upper bound of the differing share above which the sample says little.
_HIGH_BOUND = 0.2
_MAX_SHOWN_SCORES = 5


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
        drawn = draw(recorded, sample or ("100%" if is_bundle else None), seed)
        manifest = replace(
            manifest or SampleManifest(path.name, drawn.population, seed, []),
            sources=drawn.sources,
        )
        models = _find_models(drawn.sources, model, engine, is_bundle)
        scores = _check_scores(recorded, models, skipped)
        answered = []
        for pair in check_answers(manifest.sources, models, drawn.answers, reference is not None):
            answered.append(pair)
            report(ProgressPhase("verify", "", len(answered), len(drawn.answers), "answer"))
        checked, bundled = zip(*answered)
        if not _print_findings(checked, manifest, scores, is_bundle, as_json):
            if bundle is not None:
                say(f"{bundle} is not written, because something differs")
            raise typer.Exit(1)
        if output is not None:
            append(
                output, packed_bundle(manifest, sorted(bundled, key=lambda answer: answer.number))
            )
    if bundle is not None:
        say(f"{bundle} is written")


def _print_findings(
    checked: Sequence[Checked],
    manifest: SampleManifest,
    scores: ScoreCheck | None,
    is_bundle: bool,
    as_json: bool,
) -> bool:
    """Print what was found; return whether answers and scores are equal."""
    from flexgen_helm.report.scores import finite

    different = [answer for answer in checked if not answer["equal"]]
    is_equal = not different and not (scores and scores.differences)
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
        is_partial = scores and scores.unchecked
        verdict = (
            "failed"
            if not is_equal
            else "passed, as far as it was checked"
            if is_partial
            else "passed"
        )
        lines = [
            f"{verdict}: {_answers_sentence(checked, bound, manifest, is_bundle)}",
            *map(_difference_text, different),
            *_score_lines(scores, len(manifest.sources)),
        ]
        print(fill_for(sys.stdout, "\n".join(lines)))
    return is_equal


def _read(
    path: Path, output_path: Path, requests: Path | None
) -> tuple[list[AnswerFile], SampleManifest | None, Sequence[str]]:
    """Return what has answers, a bundle's manifest, and the names of runs that are left out.

    path: a suite's name, or a file that batch or lm-eval wrote, or a bundle.
    """
    if not path.is_file():
        from flexgen_helm.plugin.recorded_runs import recorded_runs  # imports HELM

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
) -> list[AnswerFile]:
    """Return a bundle's answers by the run that they are of."""

    def as_recorded(answer: BundledAnswer) -> RecordedAnswer:
        def recompute(service: Service, model: ModelArguments) -> list[Any]:
            keyed = (KeyedRequest(request, request_key(request)) for request in answer.requests)
            return [plain_result(service.respond(model, request).result) for request in keyed]

        return RecordedAnswer(answer.name, answer.results, recompute)

    return [
        AnswerFile(
            path,
            "verify",
            vars(source),
            [as_recorded(answer) for answer in answers if answer.source == index].copy,
        )
        for index, source in enumerate(manifest.sources)
    ]


def _check_scores(
    recorded: Sequence[AnswerFile], models: Sequence[ModelArguments], skipped: Sequence[str]
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


def _difference_text(checked: Checked) -> str:
    """Return an answer that differs as text for people."""
    where, old, new = checked["differences"][0]
    return (
        f"{short(checked['name'])} differs at {short(where)}, numbers by up to "
        f"{checked['largest_difference']:.3g}\n"
        f"  prompt    {short(checked['prompt'], 66)}\n"
        f"  recorded  {short(old, 66)}\n"
        f"  computed  {short(new, 66)}"
    )


def _score_lines(found: ScoreCheck | None, parts: int) -> list[str]:
    """Return lines on what was found in the scores of so many runs or files."""
    if found is None:
        return []
    wrong, lines = found.differences, found.differences[:_MAX_SHOWN_SCORES]
    if len(wrong) > _MAX_SHOWN_SCORES:
        lines.append(f"… and {len(wrong) - _MAX_SHOWN_SCORES:,} more")
    if not wrong:
        lines.append(
            f"scores, questions and references of {count(parts, 'run')}, made again, are equal"
        )
    return [*lines, *(f"not checked: {what}" for what in found.unchecked)]


def _answers_sentence(
    checked: Sequence[Checked], bound: float, manifest: SampleManifest, is_bundle: bool
) -> str:
    """Say how many answers are equal, and what that says of all; bound: as of `upper_bound`."""
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
    few = "; --sample 100% checks all" if bound > _HIGH_BOUND else ""
    return "; ".join(
        [*parts, f"with 95 % confidence at most {share_above(bound)} of {population} differ{few}"]
    )
