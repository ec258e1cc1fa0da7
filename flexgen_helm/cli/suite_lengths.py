"""What run entries ask: prompts that HELM has made, counted. Imports neither HELM nor torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexgen_helm.checkpoint.suffixes import PREFIX
from flexgen_helm.cli.console import say
from flexgen_helm.errors import UsageError
from flexgen_helm.files import count, read_object
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.suite_plan import EntryWorkload
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.report.answers import DRY_RUN_FOLDER, STATE_FILE, asked_instances
from flexgen_helm.report.scores import entry_of, require_suite
from flexgen_helm.run_entries import parse

# Arguments that change no length, or little: who answers, and how a model is told the format.
_NEUTRAL = ("model", "model_deployment", "follow_format_instructions", "output_format_instructions")


def made_prompts(suite: Path, remedy: str) -> dict[str, Path]:
    """Return the files of a suite that have prompts, by the run's name without its model.

    Raises `UsageError` without such a suite; remedy: what to do then.
    """
    require_suite(suite, remedy)
    files: dict[str, Path] = {}
    for folder in sorted(path for path in suite.iterdir() if path.is_dir()):
        for file in (folder / DRY_RUN_FOLDER / STATE_FILE, folder / STATE_FILE):
            if file.is_file():
                files.setdefault(entry_of(folder.name), file)
    return files


def prompts_of(entry: str, files: Mapping[str, Path]) -> Path | None:
    """Return the file with an entry's prompts: HELM's name of the run has its arguments and
    more.
    """
    scenario, arguments = parse(entry)
    asked = {
        key: value.replace("/", "_") for key, value in arguments.items() if key not in _NEUTRAL
    }
    for run_name, file in files.items():
        run_scenario, run_arguments = parse(run_name)
        if run_scenario == scenario and asked.items() <= run_arguments.items():
            return file
    return None


class PromptReader:
    """Counts prompts that HELM has made, with the tokenizer of the model that they were made for.

    config: of the model that is planned, which decides what is worth sharing.
    device: its type in torch.
    """

    def __init__(self, config: ModelConfig, device: str, cache_format: CacheFormat | None) -> None:
        from flexgen_helm.scheduling.prefix_tree import prefix_cost
        from flexgen_helm.service.models import ModelReader

        self._config, self._cache_format = config, cache_format
        self._cost = prefix_cost(config, device)
        self._models = ModelReader("plan")

    def workload(self, entry: str, file: Path, most_instances: int, remedy: str) -> EntryWorkload:
        """Return what the requests in HELM's file ask of so many instances.

        remedy: how to make them again.

        Raises `UsageError` for a file that cannot be used, or has fewer instances than the data.
        """
        from flexgen_helm.scheduling.prepare import prepare
        from flexgen_helm.scheduling.run_size import planned_workload
        from flexgen_helm.service.models import model_arguments

        states = read_object(file).get("request_states", ())
        if not states:
            raise UsageError(f"{file} has no requests; {remedy}")
        ids = list(dict.fromkeys(state["instance"]["id"] for state in states))
        asked = asked_instances(file.parent)
        if "max_eval_instances" not in entry and 0 < asked < most_instances and len(ids) >= asked:
            reason = f"the prompts in {file} were made with -m {asked}"
            raise UsageError(f"{reason}; plan with -m {asked}, or {remedy}")
        kept = {*ids[:most_instances]}
        states = [state for state in states if state["instance"]["id"] in kept]
        name = str(states[0]["request"]["model"])
        if not name.startswith(PREFIX):
            reason = f"the prompts in {file} were made for {name}"
            raise UsageError(f"{reason}; plan reads those of models of {PREFIX}")
        encoder = self._models.encoder(model_arguments(name, {}))
        requests = [_request(state["request"]) for state in states]
        # The ids are those of that model's vocabulary.
        vocab_size = max(self._config.vocab_size, encoder.tokenizer.vocab_size)
        config = replace(self._config, vocab_size=vocab_size)
        encoded = prepare(requests, config, encoder.tokenizer)
        if not encoded.distinct:
            raise next(iter(encoded.refused.values()))
        if encoded.refused:
            refused = count(len(encoded.refused), "request")
            say(
                f"{entry}: {refused} of {len(states):,} are too long for the model, and not counted"
            )
        planned = planned_workload(encoded.distinct, self._cost, True, self._cache_format)
        assert planned is not None
        lengths = []
        for request in encoded.distinct:
            limit = max(1, request.original.max_tokens)
            expected = _reference_tokens(states[request.indices[0]], encoder.encode) or limit
            tokens = max(1, len(request.tokens)), min(limit, expected), limit
            lengths += [tokens] * request.num_completions
        saved, scored = planned.saved_tokens, planned.scored_tokens
        return EntryWorkload(entry, len(kept), lengths, saved, scored)


def _request(recorded: Mapping[str, Any]) -> Any:
    from flexgen_helm.request import GenerationRequest

    ids = recorded.get("prompt_token_ids")
    return GenerationRequest(
        prompt=recorded["prompt"] if ids is None else None,
        prompt_token_ids=ids,
        max_tokens=recorded["max_tokens"],
        temperature=recorded["temperature"],
        stop=recorded["stop_sequences"],
        n=recorded["num_completions"],
        echo_logprobs=recorded["echo_prompt"],
    )


def _reference_tokens(
    state: Mapping[str, Any], encode: Callable[[str], tuple[int, ...]]
) -> int | None:
    """Return the tokens of the first correct answer, and one that ends it; None where nothing says
    how long it is.
    """
    if state.get("output_mapping"):
        return 2  # the letter of a choice
    references = state["instance"]["references"]
    correct = [
        reference["output"]["text"] for reference in references if "correct" in reference["tags"]
    ]
    return len(encode(f" {correct[0]}")) + 1 if correct else None
