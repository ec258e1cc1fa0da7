"""Recorded answers that the engine, and `transformers` where asked for, computes again, one at a
time, and how they compare.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.harnesses.plain_transformers import by_transformers
from flexgen_helm.progress import silenced
from flexgen_helm.report.bundles import BundledAnswer
from flexgen_helm.report.verification import (
    RecordedAnswer,
    Source,
    compare_answers,
    plain_result,
    short,
)
from flexgen_helm.request import GenerationRequest, GenerationResult
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import ModelArguments, fetch_model, read_generation
from flexgen_helm.service.service import KeyedRequest, Response, Service, SubmittedBlock

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

# An answer that was computed again, as `verify --json` prints it; a tolerance of 0 asks for equal
# bits.
Checked = dict[str, Any]
TOLERANCE = 1e-4
TRANSFORMERS_TOLERANCE = 1e-3
# Keys of a record's hardware and versions that decide bits, beside the fingerprint.
_BIT_KEYS = ("device", "name", "compute_dtype", "product_library", "switched_off", "loops", "torch")


class LoneService(Service):
    """Computes each request alone, in the caller's thread and without the response cache.

    answers: requests and results by key; a request that is there is not computed.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(EngineLoader())
        self._only_engine = engine
        self.interrupt()  # preloading returns at once
        self.answers: dict[str, tuple[GenerationRequest, GenerationResult]] = {}

    def submit(
        self, model: ModelArguments, requests: Sequence[KeyedRequest], *_: Any, **settings: Any
    ) -> SubmittedBlock:
        """Return an empty block: `respond` computes."""
        return SubmittedBlock(self, model, (), [])

    def respond(
        self, model: ModelArguments, request: KeyedRequest, use_cache: bool = True
    ) -> Response:
        """Raises `FlexgenError` for a request that fails."""
        if request.key not in self.answers:
            (result,) = self._only_engine.run([request.request])
            if result.error is not None:
                raise FlexgenError(f"an answer cannot be computed by {model.path}: {result.error}")
            self.answers[request.key] = request.request, result
        return Response(self.answers[request.key][1], is_cached=False)


class RecomputedAnswer(NamedTuple):
    """An answer that was computed again.

    service: has the requests that it took, and their results.
    computed: what `recorded.recompute` returned, to be compared with `recorded.recorded`.
    prompt: text of the first request's.
    """

    recorded: RecordedAnswer
    service: LoneService
    computed: Any
    prompt: str

    def bundled(self) -> BundledAnswer:
        """Return it as a bundle has it."""
        requests, results = [*zip(*self.service.answers.values())] or [(), ()]
        return BundledAnswer(
            self.recorded.source,
            self.recorded.number,
            self.recorded.name,
            requests,
            [*map(plain_result, results)],
        )

    def checked(self, tolerance: float, why: str, contradiction: str = "") -> Checked:
        """Compare it with the recorded one.

        why: what allows a tolerance above 0.
        contradiction: a token that was not the most probable one; "" for none.
        """
        answer = self.recorded
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


def check_answers(
    sources: list[Source],
    models: Sequence[ModelArguments],
    drawn: Sequence[RecordedAnswer],
    with_transformers: bool,
) -> Iterator[tuple[Checked, BundledAnswer]]:
    """Compute each answer alone, model by model; yield how it compares, and it as a bundle has it.

    sources: of the answers' runs; they become what was computed with here.
    models: of each source.
    with_transformers: have `transformers` score what the engine computed.
    Raises `FlexgenError` for a model that is not the recorded one, and `UsageError` for what
    `transformers` does not compute.
    """
    for key in dict.fromkeys(models[answer.source].engine_key for answer in drawn):
        folder = _folder_for_transformers(key) if with_transformers else None
        of_model = {index for index, model in enumerate(models) if model.engine_key == key}
        answers = [answer for answer in drawn if answer.source in of_model]
        recomputed = []
        with EngineLoader().load(key) as engine:
            tokenizer = engine.tokenizer
            assert tokenizer is not None
            for source in of_model:
                _require_fingerprint(sources[source], engine, key)
            for answer in answers:
                service = LoneService(engine)
                with silenced():
                    computed = answer.recompute(service, models[answer.source])
                results = [result for _, result in service.answers.values()]
                prompt = tokenizer.decode(results[0].prompt_token_ids) if results else ""
                recomputed_answer = RecomputedAnswer(answer, service, computed, prompt)
                if folder is None:
                    why = _why_bits_may_differ(sources[answer.source], engine) if results else ""
                    yield (
                        recomputed_answer.checked(TOLERANCE if why else 0.0, why),
                        recomputed_answer.bundled(),
                    )
                else:
                    recomputed.append(recomputed_answer)
            computed_with = {
                name: engine.last_run[name]
                for name in ("fingerprint", "hardware", "versions", "batch_invariant")
                if engine.last_run  # of an answer without requests nothing is computed
            }
            for source in of_model:
                sources[source] = replace(sources[source], **computed_with)
        if folder is not None:
            yield from _check_by_transformers(folder, tokenizer.eos_ids, recomputed, models)


def _check_by_transformers(
    folder: Path,
    ends: Collection[int],
    recomputed: Sequence[RecomputedAnswer],
    models: Sequence[ModelArguments],
) -> Iterator[tuple[Checked, BundledAnswer]]:
    """Compare answers with what `transformers` makes of the same tokens.

    folder: of the model. ends: ids of the tokens that end an answer.
    """
    pairs = [pair for answer in recomputed for pair in answer.service.answers.values()]
    scored = by_transformers(folder, ends, pairs, TRANSFORMERS_TOLERANCE)
    for answer in recomputed:
        bundled, contradictions = answer.bundled(), []
        for key in answer.service.answers:
            rescored = next(scored)
            answer.service.answers[key] = rescored.request, rescored.result
            contradictions.append(rescored.contradiction)
        computed = answer.recorded.recompute(answer.service, models[answer.recorded.source])
        rescored_answer = answer._replace(computed=computed)
        why, first = "by transformers in float32", next(filter(None, contradictions), "")
        yield rescored_answer.checked(TRANSFORMERS_TOLERANCE, why, first), bundled


def _require_fingerprint(source: Source, engine: Engine, model: ModelArguments) -> None:
    """Raise `FlexgenError` for a record of other weights, settings or versions than the engine's.

    On another device or in another compute type the fingerprint may be another one, too.
    """
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


def _why_bits_may_differ(source: Source, engine: Engine) -> str:
    """Return why the engine may compute other bits than the run of a record; "" if it must not."""
    if not source.batch_invariant:
        return "the run had no --batch-invariant, so its bits may follow its batches"
    if source.batch_invariant != engine.last_run["batch_invariant"]:
        return "another kind of processor, or another release of flexgen-helm"
    recorded = {**(source.hardware or {}), **(source.versions or {})}
    computed_with = {**engine.last_run["hardware"], **engine.last_run["versions"]}
    for key in _BIT_KEYS:
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
