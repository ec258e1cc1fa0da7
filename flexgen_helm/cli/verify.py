"""`flexgen-helm verify`: a random part of finished answers, computed again and compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flexgen_helm.cli.console import print_json
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
    from flexgen_helm.harnesses.plain_transformers import ScoredSequence
    from flexgen_helm.report.verification import DrawnAnswer
    from flexgen_helm.service.models import ModelArguments
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

Source = Mapping[str, Any]
TOLERANCE = 1e-4
TRANSFORMERS_TOLERANCE = 1e-3
# What of a record decides bits, beside the fingerprint.
_KIND = ("device", "name", "compute_dtype", "product_library", "switched_off", "loops", "torch")
_COMMIT = re.compile(r"(.+)@([0-9a-f]{40})")
_SHOWN = 70


class Reference(StrEnum):
    transformers = "transformers"


@dataclass(frozen=True)
class CheckedAnswer:
    """An answer that was computed again.

    prompt: as text. largest: difference of a log-probability.
    tolerance: of log-probabilities; 0 asks for equal bits. why: not for bits.
    """

    drawn: DrawnAnswer
    prompt: str
    computed: Sequence[Mapping[str, Any]]
    is_equal: bool
    largest: float
    tolerance: float
    why: str


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

    On a machine that computes as the runs' records say, answers must be equal to the bit, elsewhere log-probabilities
    within 0.0001. The exit code is 1 if an answer differs. Flags of prompts and of the engine that a run was given need
    not be given again, but for --generation-config and --unverified.

    Example:
      flexgen-helm verify mine --sample 5% --bundle mine.tar.zst
    """
    from flexgen_helm.report.verification import read_bundle, sample_size, upper_bound, write_bundle

    check_engine_flags(engine)
    is_bundle = Path(suite).is_file()

    def find_model(source: Source) -> ModelArguments:
        return _find_model(source, model, engine, is_bundle)

    if is_bundle:
        import numpy as np

        manifest, drawn = read_bundle(Path(suite))
        size = sample_size(sample or "100%", len(drawn))
        chosen = np.random.default_rng(seed).choice(len(drawn), size, replace=False)
        drawn = [drawn[number] for number in sorted(chosen)]
    else:
        from flexgen_helm.plugin.run_answers import draw_answers  # imports HELM
        from flexgen_helm.report.scores import read_finished_runs

        runs = read_finished_runs(output_path / "runs" / suite)
        sources, drawn, population = draw_answers(runs, sample, seed, find_model)
        manifest = {"suite": suite, "population": population, "seed": seed, "sources": sources}
    check = _by_transformers if reference else _by_engine
    checked: list[CheckedAnswer] = []
    models = [find_model(source) for source in manifest["sources"]]
    for answer in check(manifest["sources"], models, drawn):
        checked.append(answer)
        report(ProgressPhase("verify", "", len(checked), len(drawn), "answer"))
    different = [answer for answer in checked if not answer.is_equal]
    bound = upper_bound(len(different), len(drawn), manifest["population"])
    if as_json:
        print_json({
            "suite": manifest["suite"],
            "population": manifest["population"],
            "drawn": len(drawn),
            "equal": len(drawn) - len(different),
            "equal_to_the_bit": sum(answer.is_equal and not answer.tolerance for answer in checked),
            "not_to_the_bit": sorted({answer.why for answer in checked} - {""}),
            "largest_difference": max(answer.largest for answer in checked),
            "bound": bound,
            "differences": [
                {"name": answer.drawn.name, "prompt": answer.prompt, "recorded": answer.drawn.answers,
                 "computed": answer.computed, "largest_difference": answer.largest} for answer in different
            ],
        })  # fmt: skip
    else:
        print("\n".join([*map(_describe, different), _sentence(checked, bound, manifest, is_bundle)]))
    if different:
        raise typer.Exit(1)
    if bundle is not None:
        write_bundle(bundle, manifest, drawn)


def _find_model(source: Source, model: str | None, engine: EngineOptions, is_bundle: bool) -> ModelArguments:
    """Return the model of a run's record, as it was asked for; model: where it is here, None for its name."""
    from flexgen_helm.checkpoint import names
    from flexgen_helm.checkpoint.fetch import local_weights
    from flexgen_helm.plugin.model_names import find_model

    chat, name = source.get("chat_template") or {}, names.without_digest(source["model"])
    given = {
        "path": model, "precision": source["precision"], "apply_chat_template": chat.get("applied"),
        "chat_template_kwargs": chat.get("kwargs") or None, "system_prompt": chat.get("system_prompt"),
        "thinking_budget": chat.get("thinking_budget"),
    }  # fmt: skip
    if model is None:
        resolved = names.resolve(name)
        commit = _COMMIT.fullmatch(source.get("origin") or "")
        if commit and commit[1] == resolved.hub_repo:
            given["revision"] = commit[2]
            resolved = replace(resolved, revision=commit[2])
        is_named = resolved.path is None or name in names.user_names()
        if is_bundle and not (is_named and local_weights(resolved)):
            raise UsageError(
                f"the bundle's model {name!r}, from {source['origin']!r}, is not on this machine by that name; "
                "flexgen-helm fetch it, or name it with --model"
            )
    return find_model(name, given, engine)


def _by_model(
    models: Sequence[ModelArguments], drawn: Sequence[DrawnAnswer]
) -> Iterator[tuple[ModelArguments, list[DrawnAnswer]]]:
    """Yield answers by what must be loaded for them; models: of the sources."""
    for model in dict.fromkeys(found.engine_key for found in models):
        if answers := [answer for answer in drawn if models[answer.source].engine_key == model]:
            yield model, answers


def _by_engine(
    sources: Sequence[Source], models: Sequence[ModelArguments], drawn: Sequence[DrawnAnswer]
) -> Iterator[CheckedAnswer]:
    """Compute each request alone. Raises `UsageError` for a model that is not the recorded one."""
    from flexgen_helm.report.verification import answers_of, is_equal
    from flexgen_helm.service.loaders import EngineLoader

    for model, answers in _by_model(models, drawn):
        with EngineLoader().load(model) as engine:
            for source in {answer.source for answer in answers}:
                _require_fingerprint(sources[source], engine, model)
            if (tokenizer := engine.tokenizer) is None:
                raise UsageError(f"{model.name} has no tokenizer; name a model that has one with --model")
            for answer in answers:
                with silenced():
                    (result,) = engine.run([answer.request])
                if result.error is not None:
                    raise UsageError(f"{answer.name!r} cannot be computed: {result.error}") from result.error
                computed, why = answers_of(answer, result, tokenizer), _another_kind(sources[answer.source], engine)
                tolerance = TOLERANCE if why else 0.0
                same, largest = is_equal(answer.answers, computed, tolerance)
                prompt = tokenizer.decode(result.prompt_token_ids)
                yield CheckedAnswer(answer, prompt, computed, same, largest, tolerance, why)


def _require_fingerprint(source: Source, engine: Engine, model: ModelArguments) -> None:
    if source["fingerprint"] == engine.fingerprint:
        return
    from flexgen_helm.engine.opening import fingerprint_elsewhere

    hardware = source["hardware"] or {}
    device, dtype = (str(hardware.get(key)) for key in ("device", "compute_dtype"))
    if source["fingerprint"] != fingerprint_elsewhere(model.path, model.config, device, dtype):
        raise UsageError(
            f"{source['model']!r} in {source['precision']} has the fingerprint {source['fingerprint'][:12]!r} in the "
            f"record and {engine.fingerprint[:12]!r} here: other weights, another tokenizer, other settings, or not "
            f"flexgen-helm {(source['versions'] or {}).get('flexgen-helm')!r}; name the right model with --model"
        )


def _another_kind(source: Source, engine: Engine) -> str:
    """Return what of the record is not so here, and decides bits; "" if nothing is."""
    from flexgen_helm.report.throughput import versions

    there = {**(source["hardware"] or {}), "torch": (source["versions"] or {}).get("torch")}
    here = {**engine.last_run["hardware"], "torch": versions()["torch"]}
    for key in _KIND:
        old, new = there.get(key), here[key]
        if key == "loops" and isinstance(old, dict):  # one that was not needed there, or here, is in one record only
            old, new = {**new, **old}, {**old, **new}
        if old != new:
            return f"{key} is {old!r} in the record and {new!r} here"
    return ""


def _by_transformers(
    sources: Sequence[Source], models: Sequence[ModelArguments], drawn: Sequence[DrawnAnswer]
) -> Iterator[CheckedAnswer]:
    """Compute the recorded tokens by `transformers`. Raises `UsageError` for what it does not compute."""
    from flexgen_helm.checkpoint.fetch import fetch
    from flexgen_helm.harnesses.plain_transformers import score_sequences
    from flexgen_helm.report.verification import is_equal
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

    for model, answers in _by_model(models, drawn):
        folder = fetch(model.path, model.revision)
        folder = folder.parent if folder.suffix == ".safetensors" else folder
        settings = [(sources[answer.source]["generation_config"] or {}).get("applied") for answer in answers]
        for reason, is_so in (
            (f"it is in {model.config.precision}, which is another model", model.config.precision != "fp16"),
            ("it is a GGUF file, and transformers reads folders of safetensors", not folder.is_dir()),
            ("settings of its folder changed answers", any(settings)),
            ("the files do not have the tokens of its thinking", any(answer.request.thinking for answer in answers)),
        ):
            if is_so:
                raise UsageError(f"{model.name} cannot be checked with transformers: {reason}; leave --with out")
        if (tokenizer := Tokenizer.from_path(folder)) is None:
            raise UsageError(f"{folder} has no tokenizer; name a model that has one with --model")
        ids = {text: number for number, text in enumerate(tokenizer.token_texts(range(tokenizer.vocab_size)))}
        asked = [
            [_recorded_tokens(answer, recorded, tokenizer, ids) for recorded in answer.answers] for answer in answers
        ]
        scores = score_sequences(folder, [tokens.sequence for recorded in asked for tokens in recorded])
        for answer, recorded in zip(answers, asked):
            found = [next(scores) for _ in recorded]
            same, largest = is_equal(
                [{"logprobs": tokens.logprobs} for tokens in recorded],
                [{"logprobs": score.logprobs} for score in found],
                TRANSFORMERS_TOLERANCE,
            )
            is_greedy = answer.request.temperature == 0
            same &= len(recorded) == answer.request.n and all(tokens.is_whole for tokens in recorded)
            same &= not is_greedy or all(score.shortfall <= TRANSFORMERS_TOLERANCE for score in found)
            computed = [{"logprobs": score.logprobs, "shortfall": score.shortfall} for score in found]
            prompt = tokenizer.decode(answer.request.prompt_token_ids or ())
            why = "by transformers in float32"
            yield CheckedAnswer(answer, prompt, computed, same, largest, TRANSFORMERS_TOLERANCE, why)


class _RecordedTokens(NamedTuple):
    """Tokens of an answer as `transformers` scores them, and what is recorded of them.

    is_whole: text, tokens and end do not contradict each other.
    """

    sequence: ScoredSequence
    logprobs: Sequence[float]
    is_whole: bool


def _recorded_tokens(
    drawn: DrawnAnswer, recorded: Mapping[str, Any], tokenizer: Tokenizer, ids: Mapping[str, int]
) -> _RecordedTokens:
    """ids: of tokens by their text, for texts that are not encoded as one token."""
    from flexgen_helm.harnesses.plain_transformers import ScoredSequence
    from flexgen_helm.tokenizer.token_bytes import helm_bytes

    def id_of(text: str) -> int:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        return encoded[0] if tokenizer.token_texts(encoded) == [text] else ids.get(text, -1)

    request = drawn.request
    prompt, start = list(request.prompt_token_ids or ()), len(request.prompt_token_ids or ()) - drawn.echoed
    echoed, texts = recorded["tokens"][: drawn.echoed], recorded["tokens"][drawn.echoed :]
    is_whole = echoed == tokenizer.token_texts(prompt[start:]) and (
        b"".join(map(helm_bytes, texts)).decode(errors="replace") == recorded["text"]
        and (recorded["end"] != "length" or len(texts) == request.max_tokens)
    )
    # The text of a last token may have been cut by a stop string.
    written = [id_of(text) for text in (texts[:-1] if recorded["end"] == "stop" else texts)]
    if -1 in written:
        is_whole, written = False, written[: written.index(-1)]
    ends = sorted(tokenizer.eos_ids) if recorded["end"] == "endoftext" and is_whole else []
    first = max(1, start)  # the first token of all has no log-probability
    sequence = ScoredSequence(prompt + written, first, len(prompt), ends)
    return _RecordedTokens(sequence, recorded["logprobs"][first - start : len(sequence.ids) - start], is_whole)


def _describe(answer: CheckedAnswer) -> str:
    """Return an answer that differs as text for people."""

    def shown(found: Sequence[Mapping[str, Any]]) -> str:
        return "; ".join(f"{_short(one.get('text', ''))} {_short(one.get('end'))}" for one in found)

    lines = [f"{answer.drawn.name!r} differs", f"  prompt    {_short(answer.prompt)}"]
    lines += [f"  recorded  {shown(answer.drawn.answers)}", f"  computed  {shown(answer.computed)}"]
    return "\n".join([*lines, f"  largest difference of a log-probability: {answer.largest:.3g}"])


def _short(text: Any) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def _sentence(checked: Sequence[CheckedAnswer], bound: float, manifest: Mapping[str, Any], is_bundle: bool) -> str:
    from flexgen_helm.report.verification import share_above

    parts = []
    for why in dict.fromkeys(answer.why for answer in checked):
        alike = [answer for answer in checked if answer.why == why]
        largest = max(answer.largest for answer in alike)
        equal = sum(answer.is_equal for answer in alike)
        way = f"within {alike[0].tolerance:g}, the largest difference is {largest:.2g} ({why})" if why else "to the bit"
        parts.append(f"{equal:,} of {len(alike):,} answers equal {way}")
    every = f"this suite's {manifest['population']:,} answers"
    if is_bundle:
        every = (
            f"the {manifest['population']:,} answers of {manifest['suite']!r}, of which the bundle says it is a sample,"
        )
    if len(checked) == manifest["population"]:
        return "; ".join([*parts, f"these are all of {every}".rstrip(",")])
    return "; ".join([*parts, f"with 95 % confidence at most {share_above(bound)} of {every} differ"])
