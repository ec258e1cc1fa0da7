"""The answers of finished runs, as `verify` draws and computes them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from flexgen_helm.errors import FlexgenError
from flexgen_helm.plugin.compared_prompts import recorded_request
from flexgen_helm.plugin.context import get_context
from flexgen_helm.plugin.convert import to_helm_request, to_request_result
from flexgen_helm.plugin.score_check import check_scores, state_name
from flexgen_helm.report.run_folder import INSTANCE_STATS_FILE, RUN_FILE, SPEC_FILE, STATE_FILE
from flexgen_helm.report.scores import RunScores, read_finished_runs
from flexgen_helm.report.verification import AnswerFile, RecordedAnswer
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import Service


def recorded_runs(suite: Path) -> tuple[list[AnswerFile], list[str]]:
    """Return the answers of each run in the folder of a suite; and the names of runs that are
    unfinished or not ours.

    Raises `FlexgenError` for a file that is damaged, and `UsageError` without a folder.
    """
    runs = read_finished_runs(suite)
    skipped = {path.parent for path in suite.glob(f"*/{SPEC_FILE}")} - {run.folder for run in runs}
    for folder in sorted(skipped):
        if (folder / INSTANCE_STATS_FILE).exists() and (folder / RUN_FILE).exists():
            raise FlexgenError(
                f"a file in {folder} is damaged; make the run again with flexgen-helm run"
            )
    return [*map(_recorded_run, runs)], sorted(folder.name for folder in skipped)


def _recorded_run(run: RunScores) -> AnswerFile:
    assert run.folder is not None
    path, models = run.folder / STATE_FILE, get_context().models

    def as_answer(state: Mapping[str, Any]) -> RecordedAnswer:
        def recompute(service: Service, model: ModelArguments) -> list[Any]:
            request = recorded_request(run, state)
            helm_request = to_helm_request(request, model, models)
            result = service.respond(model, helm_request).result
            encoder, is_cached = models.encoder(model), True  # as HELM reads it from its cache
            answer = to_request_result(request, helm_request, result, is_cached, encoder)
            return [_comparable(asdict(output)) for output in answer.completions]

        outputs = [_comparable(output) for output in state["result"]["completions"]]
        return RecordedAnswer(f"{run.name}, {state_name(state)}", outputs, recompute)

    def read() -> list[RecordedAnswer]:
        states = json.loads(path.read_bytes())["request_states"]
        return [as_answer(state) for state in states if state["result"]["success"]]

    return AnswerFile(path, "run", run.record, read, partial(check_scores, run))


def _comparable(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return a completion with, in place of its log-probability, how far that is from the sum of
    its tokens': so it is compared token by token.
    """
    return {
        **output,
        "logprob": output["logprob"] - sum(token["logprob"] for token in output["tokens"]),
    }
