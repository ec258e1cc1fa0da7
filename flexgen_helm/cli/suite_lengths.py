"""What run entries ask: lengths of prompts that HELM has made, or of a stated table. Imports neither HELM nor torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexgen_helm.checkpoint.names import PREFIX
from flexgen_helm.errors import UsageError
from flexgen_helm.files import read_object
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.plan import EntryWorkload
from flexgen_helm.planner.policy import Workload
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.report.answers import STATE_FILE, asked_instances
from flexgen_helm.report.scores import entry_of, require_suite
from flexgen_helm.run_entries import parse
from flexgen_helm.runs.lengths import ASSUMED_FACTOR, lengths_of

# Folder of a dry run's files; a test compares it with the plugin's, which imports HELM.
DRY_RUN_FOLDER = "dry_run"
# Answers have between so much less and so much more than the right ones: docs/explanation/planning.md has measurements.
ANSWER_FACTOR = 2.0
# Arguments that change no length, or little: who answers, and how an instruct model is told the format.
_NEUTRAL = ("model", "model_deployment", "follow_format_instructions", "output_format_instructions")


def stated_workload(entry: str, most_instances: int, config: ModelConfig) -> EntryWorkload:
    """Return what an entry asks by the table of lengths.

    Raises `UsageError` for a scenario that the table does not have.
    """
    scenario, arguments = parse(entry)
    asked = {key: value for key, value in arguments.items() if key not in _NEUTRAL}
    found = lengths_of(scenario, asked)
    if found is None:
        raise UsageError(
            f"the lengths of {entry!r} are not known; make its prompts with `flexgen-helm run --dry-run -m N "
            "--suite NAME`, and add --suite NAME"
        )
    lengths, unread = found
    basis, source = lengths.basis, lengths.source
    if unread and basis != "assumed":
        basis, source = "assumed", f"{source}; without {', '.join(unread)}"
    factor = ASSUMED_FACTOR if basis == "assumed" else 1.0
    instances = min(most_instances, lengths.instances)
    requests = max(1, round(instances * lengths.requests))
    room = config.max_positions - lengths.max_tokens  # for a prompt; HELM cuts a longer one

    def workload(prompts: float, answer: float) -> Workload:
        prompt = max(1, min(round(prompts * lengths.prompt), room))
        instance = round(prompts * (lengths.prompt - lengths.shared))  # HELM leaves examples out, which are shared
        shared = max(0, prompt - max(1, instance))
        saved = shared * (requests - 1) + (lengths.completions - 1) * requests * prompt
        total = requests * lengths.completions * prompt
        group = (prompt, max(1, round(min(answer, lengths.max_tokens))), requests * lengths.completions)
        return Workload((group,), saved, total - saved if lengths.scored else 0)

    return EntryWorkload(
        entry,
        basis,
        source,
        shortest=workload(1 / factor, lengths.answer / ANSWER_FACTOR),
        expected=workload(1.0, lengths.answer),
        longest=workload(factor, lengths.answer * ANSWER_FACTOR),
        limit=workload(factor, lengths.max_tokens),
        instances=instances,
    )


def made_prompts(suite: Path) -> dict[str, Path]:
    """Return the files of a suite that have prompts, by the run's name without its model.

    Raises `UsageError` without such a suite, and for one without prompts.
    """
    require_suite(suite, "make its prompts with `flexgen-helm run --dry-run`")
    files: dict[str, Path] = {}
    for folder in sorted(path for path in suite.iterdir() if path.is_dir()):
        for file in (folder / STATE_FILE, folder / DRY_RUN_FOLDER / STATE_FILE):
            if file.is_file():
                files.setdefault(entry_of(folder.name), file)
    if not files:
        raise UsageError(f"the suite in {suite} has no prompts; make them with `flexgen-helm run --dry-run`")
    return files


def prompts_of(entry: str, made: Mapping[str, Path]) -> Path | None:
    """Return the file with the prompts of an entry: HELM's name of the run has its arguments, and defaults besides."""
    scenario, arguments = parse(entry)
    asked = {key: value.replace("/", "_") for key, value in arguments.items() if key not in _NEUTRAL}
    for name, file in made.items():
        found, theirs = parse(name)
        if found == scenario and asked.items() <= theirs.items():
            return file
    return None


class PromptReader:
    """Counts the tokens of prompts that HELM has made, each with the tokenizer of the model that it was made for.

    config: of the model that is planned, which decides what is worth sharing. device: its type in torch.
    """

    def __init__(self, config: ModelConfig, device: str, cache_format: CacheFormat | None) -> None:
        from flexgen_helm.scheduling.prefix_tree import prefix_cost
        from flexgen_helm.service.models import ModelReader

        self._config, self._cache_format = config, cache_format
        self._cost = prefix_cost(config, device)
        self._models = ModelReader("plan")

    def workload(self, entry: str, file: Path, most_instances: int) -> EntryWorkload:
        """Return what the requests in HELM's file ask of so many instances.

        Raises `UsageError` for a file that cannot be used, and for one that has fewer of them than the data.
        """
        from flexgen_helm.planner.policy import ROW
        from flexgen_helm.scheduling.prepare import planned_workload, prepare
        from flexgen_helm.service.models import model_arguments

        states = read_object(file).get("request_states", ())
        if not states:
            raise UsageError(f"{file} has no requests; make the prompts again with `flexgen-helm run --dry-run`")
        ids = list(dict.fromkeys(state["instance"]["id"] for state in states))
        asked = most_instances if "max_eval_instances" in entry else asked_instances(file.parent)
        if 0 < asked < most_instances and len(ids) >= asked:
            raise UsageError(
                f"the prompts in {file} were made with -m {asked}; plan with -m {asked}, or make them with -m "
                f"{most_instances} in another suite"
            )
        kept = {*ids[:most_instances]}
        states = [state for state in states if state["instance"]["id"] in kept]
        name = str(states[0]["request"]["model"])
        if not name.startswith(PREFIX):
            raise UsageError(f"the prompts in {file} were made for {name}; plan reads those of models of flexgen/")
        encoder = self._models.encoder(model_arguments(name, {}))
        requests = [_request(state["request"]) for state in states]
        # The ids are those of that model's vocabulary.
        config = replace(self._config, vocab_size=max(self._config.vocab_size, encoder.tokenizer.vocab_size))
        encoded = prepare(requests, config, encoder.tokenizer, ROW)
        if not encoded.distinct:
            raise next(iter(encoded.refused.values()))
        planned = planned_workload(encoded.distinct, self._cost, True, self._cache_format)
        assert planned is not None
        answers = []
        for request in encoded.distinct:
            most = max(1, request.request.max_tokens)
            answers.append(min(most, _reference_tokens(states[request.indices[0]], encoder.encode) or most))

        def workload(factor: float) -> Workload:
            lengths = [
                (max(1, len(request.tokens)), max(1, round(min(request.request.max_tokens, factor * answer))))
                for request, answer in zip(encoded.distinct, answers)
                for _ in range(request.num_completions)
            ]
            return Workload.of(lengths, planned.saved_tokens, planned.scored_tokens)

        source = f"{len(states):,} requests, counted with the tokenizer of {name}"
        if encoded.refused:
            source += f"; {len(encoded.refused):,} are too long for the model"
        factors = (1 / ANSWER_FACTOR, 1.0, ANSWER_FACTOR, math.inf)
        return EntryWorkload(entry, "prompts", source, len(kept), *map(workload, factors))


def _request(asked: Mapping[str, Any]) -> Any:
    from flexgen_helm.request import GenerationRequest

    ids = asked.get("prompt_token_ids")
    return GenerationRequest(
        prompt=asked["prompt"] if ids is None else None,
        prompt_token_ids=ids,
        max_tokens=asked["max_tokens"],
        temperature=asked["temperature"],
        stop=asked["stop_sequences"],
        n=asked["num_completions"],
        echo_logprobs=asked["echo_prompt"],
    )


def _reference_tokens(state: Mapping[str, Any], encode: Callable[[str], tuple[int, ...]]) -> int | None:
    """Return the tokens of the first correct answer, and one that ends it; None where nothing says how long it is."""
    if state.get("output_mapping"):
        return 2  # the letter of a choice
    references = state["instance"]["references"]
    correct = [reference["output"]["text"] for reference in references if "correct" in reference["tags"]]
    return len(encode(f" {correct[0]}")) + 1 if correct else None
