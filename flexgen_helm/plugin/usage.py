"""What runs cost: tokens, seconds and throughput of one HELM run (`flexgen_run.json`), of several,
and of a suite.

Every result carries its own share of the work (`Cost`). So a run's usage is the same whether it was
computed alone, in a suite-wide block, or in part by an earlier process whose results are in the
response cache.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flexgen_helm.errors import FlexgenError
from flexgen_helm.files import read_object, replace_json
from flexgen_helm.plugin.convert import HelmRequest
from flexgen_helm.report.block_records import BLOCK_KEYS, suite_totals
from flexgen_helm.report.run_folder import RUN_FILE
from flexgen_helm.report.suite import SUITE_FILE
from flexgen_helm.report.throughput import throughput
from flexgen_helm.report.versions import versions
from flexgen_helm.request import Cost
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.service.service import Response, Service, SubmittedBlock
from flexgen_helm.tokenizer.thinking import is_unfinished


@dataclass
class HelmRun:
    """One HELM run in progress.

    Filled by the patches of HELM: the times (`time.monotonic()`), then what `record_block` sets.

    keys: one per request, repeated where requests are equal.
    block: `Engine.last_run` of the block that computed the run; empty if nothing was computed.
    chat_template: what was decided about it; None for a run that only scores or continues texts.
    num_clipped: requests whose `max_tokens` the window did not leave.
    unfinished_thinking: requests with an answer that ended while the model was still thinking.
    sample: `instances` that were drawn with `seed`, of how many; None for all.
    level_share: of the level that a test of it may spend, with --until-decided.
    entry: what HELM made the run of; None if that is not known.
    requests_digest: of the requests, with questions and references.
    """

    name: str
    folder: Path
    model: ModelArguments
    started: float = field(default_factory=time.monotonic)
    adapt_started: float | None = None
    execute_started: float | None = None
    execute_ended: float | None = None
    load_s: float = 0.0
    keys: list[str] = field(default_factory=list)
    responses: dict[str, Response] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    chat_template: dict[str, Any] | None = None
    num_clipped: int = 0
    unfinished_thinking: int = 0
    sample: dict[str, int] | None = None
    level_share: float | None = None
    entry: str | None = None
    requests_digest: str | None = None

    def record_block(
        self, service: Service, block: SubmittedBlock, requests: Sequence[HelmRequest]
    ) -> None:
        """Take the responses of the executed run from its block. requests: those that were
        submitted as this block.
        """
        self.execute_ended = time.monotonic()
        self.load_s = service.loading_s(self.model, self.execute_started or self.execute_ended)
        self.keys, self.responses = block.keys, block.responses()
        self.num_clipped = sum(request.is_clipped for request in requests)
        self.unfinished_thinking = sum(map(self._is_unfinished, requests))
        if (loaded := service.loaded(self.model)) is not None:
            self.fingerprint = loaded.fingerprint
            self.block = computed_blocks(service, [block]).get(loaded.fingerprint, {})

    def _is_unfinished(self, request: HelmRequest) -> bool:
        thinking, response = request.request.thinking, self.responses.get(request.key)
        if thinking is None or response is None:
            return False
        completions = response.result.completions
        return any(is_unfinished(completion, thinking) for completion in completions)

    def usage(self) -> dict[str, Any]:
        costs = {key: response.result.cost for key, response in self.responses.items()}
        return requests_usage(self.keys, costs)

    def wall_s(self) -> dict[str, float]:
        """Return the seconds of each stage so far.

        `load` is what the run waited for its model, which is loaded while data and prompts are
        made. In a suite-wide block `generate` is only what this run still had to wait.
        """
        now = time.monotonic()
        execute_started = self.execute_started or now
        adapt_started = self.adapt_started or execute_started
        execute_ended = self.execute_ended or now
        return {
            "data": adapt_started - self.started,
            "adapt": execute_started - adapt_started,
            "load": self.load_s,
            "generate": max(0.0, execute_ended - execute_started - self.load_s),
            "metrics": now - execute_ended,
        }

    def as_json(self) -> dict[str, Any]:
        """Return what the engine says of the block, with this run's own share where it has one."""
        return {
            **self.block,
            "model": self.model.name,
            "fingerprint": self.fingerprint,
            "precision": self.model.config.precision,
            "chat_template": self.chat_template,
            "num_clipped": self.num_clipped,
            "unfinished_thinking": self.unfinished_thinking,
            "sample": self.sample,
            "look": self.level_share,
            "entry": self.entry,
            "asked": self.requests_digest,
            **self.usage(),
            "num_reused": sum(response.is_cached for response in self.responses.values()),
            "wall_s": self.wall_s(),
            "versions": versions(),
        }

    def write(self) -> None:
        """Write `flexgen_run.json`. A run that computed nothing keeps what the file says of its
        results' block.
        """
        path = self.folder / RUN_FILE
        recorded = {} if self.block else read_object(path)
        if recorded.get("fingerprint") != self.fingerprint:
            recorded = {}
        replace_json(
            path,
            {**dict.fromkeys(BLOCK_KEYS), **local_files(self.model), **recorded, **self.as_json()},
        )


@cache
def local_files(model: ModelArguments) -> dict[str, Any]:
    """Return `origin` of a model's weights, as its engine would say it, and `checkpoint_bytes` of
    each stored type.

    Empty if no file of the model is on this machine.
    """
    from flexgen_helm.checkpoint.local_files import bytes_by_type, local_weights, origin_of
    from flexgen_helm.checkpoint.names import resolve

    with suppress(FlexgenError, OSError, ValueError):
        resolved = resolve(model.path, model.revision)
        path = local_weights(resolved)
        if path is not None and model.config.weights == "pretrained":
            return {"origin": origin_of(resolved, path), "checkpoint_bytes": bytes_by_type(path)}
    return {}


def requests_usage(keys: Sequence[Hashable], costs: Mapping[Any, Cost]) -> dict[str, Any]:
    """Return workload, throughput and times of the requests `keys`; one without a cost failed and
    does not count.

    A repeated request counts with its tokens, and costs nothing: it was not computed again.
    """
    charged: list[Cost] = []
    unique: set[Hashable] = set()
    for key in keys:
        if (cost := costs.get(key)) is None:
            continue
        repeated = Cost(
            prompt_tokens=cost.prompt_tokens,
            output_tokens=cost.output_tokens,
            padded_prompt_tokens=cost.prompt_tokens,
            padded_output_tokens=cost.output_tokens,
        )
        charged.append(repeated if key in unique else cost)
        unique.add(key)
    usage = throughput(charged, sum(cost.prefill_s + cost.decode_s for cost in charged))
    usage["workload"] = {
        "num_requests": len(charged),
        "num_unique": len(unique),
        **usage["workload"],
    }
    return usage


def computed_blocks(
    service: Service, blocks: Iterable[SubmittedBlock]
) -> dict[str, dict[str, Any]]:
    """Return `Engine.last_run` of what was computed of blocks, by fingerprint."""
    computed = {}
    for block in blocks:
        loaded = service.loaded(block.model)
        answers = block.responses().values()
        if loaded is not None and any(not answer.is_cached for answer in answers):
            computed[loaded.fingerprint] = loaded.last_run
    return computed


def suite_usage(folder: Path, tried: Collection[str], failed: Collection[str]) -> dict[str, Any]:
    """Return `runs`, `failed`, `totals` and `models` of the suite in `folder`, from its runs'
    files.

    tried, failed: names of runs of this call.
    """
    runs = {path.parent.name: read_object(path) for path in sorted(folder.glob(f"*/{RUN_FILE}"))}
    before = read_object(folder / SUITE_FILE).get("failed", ())
    names = sorted(({*before} - {*tried}) | {*failed})
    return {"runs": list(runs), "failed": names, **suite_totals(runs.values())}
