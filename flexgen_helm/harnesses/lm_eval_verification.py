"""Answers and scores that lm-evaluation-harness has written, for `flexgen-helm verify`."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, sanitize_list

from flexgen_helm.errors import FlexgenError
from flexgen_helm.files import read_object
from flexgen_helm.harnesses.lm_eval import FlexgenLM
from flexgen_helm.report.verification import (
    AnswerFile,
    RecordedAnswer,
    ScoreCheck,
    disagreements,
)
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import Service

_SCORE_TOLERANCE = 1e-9  # of sums in another order


@dataclass(frozen=True)
class _LoggedDocument:
    """A line that the harness has logged for a document and a filter of its task.

    requests: the arguments of each.
    kind: name of the model's method that answers them.
    answers: to each request, one for each repeat; numbers, true and false are parsed.
    """

    requests: list[tuple[Any, ...]]
    kind: str
    answers: Sequence[Sequence[Any]]

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> _LoggedDocument:
        requests = [tuple(arguments.values()) for arguments in line["arguments"].values()]
        if isinstance(requests[0][-1], dict):
            return cls(requests, "generate_until", line["resps"])
        # The harness writes numbers, true and false as texts.
        values = json.loads(json.dumps(line["resps"]).replace('"', "").lower())
        kind = "loglikelihood" if len(requests[0]) > 1 else "loglikelihood_rolling"
        return cls(requests, kind, values)


class _ReplayedLM(FlexgenLM):
    """A model that computes nothing: it answers as the harness has logged.

    answers: by task and document, those to each of its requests, one for each repeat.
    """

    answers: Mapping[tuple[Any, Any], Sequence[Sequence[Any]]] = {}

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[Any]:
        num_repeats: Counter[int] = Counter()
        answers = []
        for request in requests:  # a repeated one is the same object
            repeat = num_repeats[id(request)]
            try:
                document_answers = self.answers[request.task_name, request.doc_id]
                answers.append(document_answers[request.idx][repeat])
            except LookupError:
                raise FlexgenError(
                    f"{request.task_name}, document {request.doc_id} has no answer"
                ) from None
            num_repeats[id(request)] += 1
        return answers

    loglikelihood_rolling = generate_until = loglikelihood


def _evaluate_again(
    content: Mapping[str, Any], model: ModelArguments, lines: Mapping[str, Sequence[Any]]
) -> Any:
    """Return what the harness makes of logged answers: prompts, filters, metrics of documents, and
    results.

    content: of the file of results.
    lines: of documents, by task.
    """
    config, groups = content["config"], content["group_subtasks"]
    lm = _ReplayedLM(**_model_arguments(config, model, Service(EngineLoader())))
    lm.answers = {
        (task, line["doc_id"]): _LoggedDocument.parse(line).answers
        for task, task_lines in lines.items()
        for line in task_lines
    }
    task_files = [task["metadata"].get("config_source") for task in content["configs"].values()]
    folders = {Path(file).parent for file in task_files if file}
    manager = TaskManager(
        include_path=[folder for folder in folders if folder.is_dir()],
        metadata=config["model_args"],
    )
    random.seed(config["random_seed"])
    np.random.seed(config["numpy_seed"])
    members = {name for names in groups.values() for name in names}  # come with their groups
    names = [name for name in {**groups, **content["configs"]} if name not in members]
    loaded = manager.load(names)
    for name, task in loaded["tasks"].items():
        if config["gen_kwargs"] and task.get_config("output_type") == "generate_until":
            task.set_config(key="generation_kwargs", value=config["gen_kwargs"], update=True)
        task.set_config(key="num_fewshot", value=content["n-shot"][name])
        task.set_fewshot_seed(seed=config["fewshot_seed"])
    return evaluate(
        lm,
        loaded,
        limit=config["limit"],
        bootstrap_iters=config["bootstrap_iters"],
        system_instruction=content.get("system_instruction"),
        apply_chat_template=bool(content.get("chat_template")),
        fewshot_as_multiturn=bool(content.get("fewshot_as_multiturn")),
    )


def _model_arguments(
    config: Mapping[str, Any], model: ModelArguments, service: Service
) -> dict[str, Any]:
    """Return the recorded arguments of the model, with where it is here."""
    overrides = {"pretrained": model.path, "revision": model.revision, "_service": service}
    return {**config["model_args"], **overrides}


def _check_scores(
    content: Mapping[str, Any], model: ModelArguments, lines: Mapping[str, Sequence[Any]]
) -> ScoreCheck:
    """Compare results, and the lines of documents, with what the harness makes of the answers."""
    check = ScoreCheck()
    sampled = [
        name
        for name, number in content.get("n-samples", {}).items()
        if content["config"]["limit"] is None and number["effective"] < number["original"]
    ]
    if sampled:  # the file does not say which documents `--samples` named
        check.not_checked(f"scores of {', '.join(sampled)}", "they were made with --samples")
        return check
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            evaluated = _evaluate_again(content, model, lines)
    except FlexgenError as error:
        return ScoreCheck([str(error)])
    except Exception as error:  # of any task whose definition or data is not here
        check.not_checked(
            f"scores, questions and right answers of {', '.join(content['configs'])}", error
        )
        return check
    evaluated = json.loads(json.dumps(evaluated, default=handle_non_serializable))
    for name, old in content["results"].items():
        new = evaluated["results"].get(name)
        check.differences += disagreements(name, old, new, _SCORE_TOLERANCE)
    for task, task_lines in lines.items():
        check.differences += _differing_documents(task, task_lines, evaluated["samples"][task])
    return check


def _differing_documents(
    task: str, logged: Sequence[Mapping[str, Any]], evaluated: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return sentences on documents whose lines differ, but for the answers."""
    old_lines = [{**line, "arguments": _LoggedDocument.parse(line).requests} for line in logged]
    new_lines = [
        {
            **line,
            "target": str(line["target"]),
            "filtered_resps": sanitize_list(line["filtered_resps"]),
        }
        for line in evaluated
    ]
    old, new = (
        {
            f"document {line['doc_id']}, filter {line['filter']}": {**line, "resps": ()}
            for line in lines
        }
        for lines in (old_lines, new_lines)
    )
    sentences = [
        sentence
        for name in {**new, **old}
        for sentence in disagreements(
            f"{task}, {name}", old.get(name), new.get(name), _SCORE_TOLERANCE
        )
    ]
    if len(logged) > len(old):
        sentences.append(f"{task} has {len(logged) - len(old):,} documents more than once")
    return sentences


def _read_samples(results: Path, task: str) -> list[Any]:
    """Return the lines of a task's documents, which lie beside its results."""
    time = results.stem.rpartition("_")[2]  # when the harness wrote both
    file = results.with_name(f"samples_{task}_{time}.jsonl")
    return [json.loads(line) for line in file.read_bytes().splitlines()]


def recorded_answers(results: Path) -> AnswerFile:
    """Return the documents that the harness has written beside its results, with the answers to
    their requests.

    A document is there once for each filter of its task.
    """
    content = read_object(results)
    config = content.get("config", {})
    record = config.get("flexgen_run", {})
    models: list[FlexgenLM] = []  # opened by the first answer
    # By request: how often it was drawn for documents before each one; each draw has another seed.
    draws_by_request: dict[str, dict[Any, int]] = defaultdict(dict)

    def as_recorded(task: str, line: Any) -> RecordedAnswer:
        document = _LoggedDocument.parse(line)
        num_earlier_draws = []
        for request, answers in zip(document.requests, document.answers, strict=True):
            earlier = draws_by_request[json.dumps(request, sort_keys=True)]
            key = (task, line["doc_id"])
            num_earlier_draws.append(earlier.setdefault(key, len(earlier) * len(answers)))

        def recompute(service: Service, model: ModelArguments) -> list[Any]:
            import torch

            if not models:
                models.append(FlexgenLM(**_model_arguments(config, model, service)))
            models[0].use_service(service)
            torch.manual_seed(record["seed"])
            compute = getattr(models[0], document.kind)
            metadata = (task, line["doc_id"], 1)
            results = []
            for request, answers, num_earlier in zip(
                document.requests, document.answers, num_earlier_draws
            ):
                instance = Instance(document.kind, line["doc"], request, 0, metadata)  # type: ignore[arg-type]
                drawn = compute([instance] * (num_earlier + len(answers)))
                results.append(drawn[num_earlier:])
            return results

        name, has_sums = f"{task}, document {line['doc_id']}", document.kind != "generate_until"
        return RecordedAnswer(name, document.answers, recompute, has_sums=has_sums)

    @cache
    def logged() -> dict[str, list[Any]]:
        return {task: _read_samples(results, task) for task in content["configs"]}

    def read() -> list[RecordedAnswer]:
        return [
            as_recorded(task, line) for task, lines in logged().items() for line in lines
            if line["filter"] == lines[0]["filter"]
        ]  # fmt: skip

    return AnswerFile(
        results,
        "lm-eval --log_samples",
        record,
        read,
        lambda model: _check_scores(content, model, logged()),
    )
