"""HELM with two clients in one process, our own and HELM's for Hugging Face models, on the same
weights.

As a script, in a folder with `job.json`: `helm-run` for its entries, then its requests through each
client. It writes `outcome.json`; see `Outcome`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from flexgen_helm.benchmarks.clients import CHAT_REFERENCE, REFERENCE, helm_configs, with_model
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.forks import python

# Our model and HELM's, without a chat template and as either client decides by itself.
RAW, CHAT = ("flexgen/tiny-no-template", REFERENCE), ("flexgen/tiny", CHAT_REFERENCE)
MODELS = (*RAW, *CHAT)


@dataclass(frozen=True)
class Job:
    """What both clients do; kinds are names of the test's own.

    entries: for each model, kind -> run entry.
    requests: for each model, kind -> fields of HELM's `Request`.
    """

    entries: Mapping[str, Mapping[str, str]]
    requests: Mapping[str, Mapping[str, Mapping[str, Any]]]
    instances: int


@dataclass(frozen=True)
class Outcome:
    """What they did.

    fed: for each model, the token ids that it was given by the runs, without repetitions, which we
        compute once.
    fed_by_request: the same for the requests, in order.
    folders: for each model and kind, the folder of its run.
    completions: for each model and kind of request, {text, logprob, tokens: [[text, logprob], …]}
        of each completion.
    """

    fed: Mapping[str, Sequence[Sequence[int]]]
    fed_by_request: Mapping[str, Mapping[str, Sequence[int]]]
    folders: Mapping[str, Mapping[str, str]]
    completions: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


def run_both(folder: Path, model: Path, positions: int, job: Job) -> Outcome:
    """Do `job` with the checkpoint `model` in `folder`, where the data of the entries already
    is.
    """
    tokenizer = Tokenizer.from_path(model)
    assert tokenizer is not None
    (folder / "prod_env").mkdir()
    for name, content in helm_configs(model, positions, tokenizer).items():
        (folder / "prod_env" / name).write_text(yaml.safe_dump(content), encoding="utf-8")
    (folder / "models.yaml").write_text(json.dumps({"tiny": {"path": str(model)}}))
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    variables = {"FLEXGEN_HELM_MODELS": str(folder / "models.yaml"), "FLEXGEN_HELM_HOME": str(folder / "home"),
                 "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [*python("all"), __file__]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return Outcome(**json.loads((folder / "outcome.json").read_text()))


class _Recorder:
    """Token ids that each model was given, in order and without repetitions. model: whose run it
    is.
    """

    def __init__(self) -> None:
        self.model = ""
        self._ids: dict[str, dict[tuple[int, ...], None]] = {}

    def add(self, ids: Sequence[int]) -> None:
        self._ids.setdefault(self.model, {})[tuple(ids)] = None

    def take(self) -> dict[str, list[list[int]]]:
        ids, self._ids = (
            {model: [list(ids) for ids in given] for model, given in self._ids.items()},
            {},
        )
        return ids


def _main() -> None:
    from helm.benchmark import run
    from helm.benchmark.run_spec import RunSpec
    from helm.benchmark.runner import Runner
    from helm.clients.auto_client import AutoClient
    from helm.common.cache_backend_config import BlackHoleCacheBackendConfig
    from helm.common.request import Request

    job = Job(**json.loads(Path("job.json").read_text()))
    recorder = _Recorder()
    _record_ours(recorder)
    _record_theirs(recorder)
    entries = {
        model: {kind: with_model(entry, model) for kind, entry in job.entries[model].items()}
        for model in MODELS
    }
    run_one = Runner.run_one

    # the plugin compares the names of parameters
    def run_of_model(self: Runner, run_spec: RunSpec) -> None:
        recorder.model = run_spec.adapter_spec.model_deployment
        run_one(self, run_spec)

    Runner.run_one = run_of_model  # type: ignore[method-assign]
    sys.argv = ["helm-run", "-r", *(entry for model in MODELS for entry in entries[model].values()),
                "-m", str(job.instances), "-n", "1", "--suite", "s", "--disable-cache", "--exit-on-error"]  # fmt: skip
    run.main()
    fed, fed_by_request, completions = recorder.take(), {}, {}
    folders = {
        model: {kind: _folder(entry) for kind, entry in entries[model].items()} for model in MODELS
    }
    client = AutoClient({}, "cache", BlackHoleCacheBackendConfig())
    for model in MODELS:
        recorder.model, fed_by_request[model], completions[model] = model, {}, {}
        for kind, fields in job.requests[model].items():
            result = client.make_request(Request(model=model, model_deployment=model, **fields))
            assert result.success, result.error
            (fed_by_request[model][kind],) = recorder.take()[model]
            completions[model][kind] = [asdict(completion) for completion in result.completions]
    Path("outcome.json").write_text(
        json.dumps(asdict(Outcome(fed, fed_by_request, folders, completions)))
    )


def _folder(entry: str) -> str:
    from helm.benchmark.run_spec_factory import construct_run_specs
    from helm.common.object_spec import parse_object_spec

    (spec,) = construct_run_specs(parse_object_spec(entry))
    return str(Path("benchmark_output/runs/s", spec.name.replace("/", "_")).resolve())


def _record_ours(recorder: _Recorder) -> None:
    """What the engine says that it computed."""
    from flexgen_helm import Engine

    original = Engine.run

    def run(self: Engine, *args: Any, **kwargs: Any) -> Any:
        results = original(self, *args, **kwargs)
        for result in results if self.name else ():  # the engine of a proof has no name
            recorder.add(result.prompt_token_ids)
        return results

    Engine.run = run  # type: ignore[method-assign]


def _record_theirs(recorder: _Recorder) -> None:
    """The first input of the model in each request."""
    from helm.clients.huggingface_client import HuggingFaceServer
    from transformers import LlamaForCausalLM

    serve, forward, is_first = HuggingFaceServer.serve_request, LlamaForCausalLM.forward, [False]

    def serve_request(self: Any, raw_request: Any) -> Any:
        is_first[0] = True
        return serve(self, raw_request)

    def first_forward(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        if is_first[0]:
            recorder.add(input_ids[0].tolist())
            is_first[0] = False
        return forward(self, input_ids, *args, **kwargs)

    HuggingFaceServer.serve_request = serve_request  # type: ignore[method-assign]
    LlamaForCausalLM.forward = first_forward  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    _main()
