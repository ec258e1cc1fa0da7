"""`bench clients`: whole HELM runs in processes of their own, with our client and with HELM's own Hugging Face client.

HELM's client gets its best: float32 (its default, float16, is far slower on CPUs), the better of one and four
threads, no chat template, and the very weights and tokenizer that we use, already dequantized. Each measurement is
a fresh process with nothing to reuse. For MMLU the same prompts also go through `transformers` by itself, in padded
batches of 16, the longest first.
"""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from flexgen_helm.benchmarks import Options, summary
from flexgen_helm.benchmarks.helm_runs import HELM, SUITE, HelmRun, helm_run
from flexgen_helm.benchmarks.padded_task import padded
from flexgen_helm.benchmarks.reference import export, same_tokens
from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.paths import data_dir
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.report.throughput import versions
from flexgen_helm.tokenizer.tokenizer import Tokenizer

REPEATS = 3
BUSY_LOAD = 0.5  # runnable processes before we begin
QUICK_INSTANCES, QUICK_REPEATS = 5, 1
OURS, REFERENCE = f"flexgen/{WHEEL_MODEL}", "reference/huggingface"
PADDED_BATCH = 16
# Log-probability metrics are equal within this relative difference, all others exactly.
TOLERANCE = 1e-4
# Metrics of log-probabilities, and what each says where every token has probability 1.
_OF_CERTAINTY = {"logprob": 0.0, "bits_per_byte": 0.0, "perplexity": 1.0, "max_prob": 1.0}
# Spaces, digits, scripts: where two copies of a tokenizer would part.
_SAMPLE = ["Rules: If Bob is big, then Bob is 1234 kind.\nFact:\tIt's  cold.", "naïve café, 東京 🙂", "", " "]


@dataclass(frozen=True)
class Task:
    """Entries of one run of `helm-run`. data: what must be in the data folder; padded: also against `transformers`."""

    name: str
    entries: tuple[str, ...]
    instances: int
    data: str | None = None
    padded: bool = False


TASKS = (
    Task("mmlu", ("mmlu:subject=abstract_algebra", "mmlu:subject=us_foreign_policy"), 1000, "mmlu", padded=True),
    Task("natural", ("synthetic_reasoning_natural:difficulty=easy",), 100),
    Task("pattern_match", ("synthetic_reasoning:mode=pattern_match",), 100),
    Task("lambada", ("lambada:mode=accuracy", "lambada:mode=perplexity"), 500, "lambada_openai_test.jsonl"),
)
# Side -> program, model, threads.
SIDES: Mapping[str, tuple[Sequence[str], str, int | None]] = {
    "flexgen-helm run": (SUITE, OURS, None),
    "helm-run with flexgen": (HELM, OURS, None),
    "huggingface -n 1": (HELM, REFERENCE, 1),
    "huggingface -n 4": (HELM, REFERENCE, 4),
}
FLEXGEN = [side for side, (_, model, _) in SIDES.items() if model == OURS]


def run(options: Options) -> dict[str, Any]:
    """Measure all sides in alternation; see `flexgen_helm.benchmarks` for the format.

    Beside it, a task: `bound` (seconds that the trie of its prompts and its decoded tokens take at the measured rate),
    `scores` (what differs between the sides), `prompts` (tokens asked for, nodes, computed, and the efficiency).
    """
    if options.engine:
        raise UsageError(
            f"bench clients runs plain helm-run, which has no engine flags: leave out {list(options.engine)}"
        )
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    tasks, notes = _tasks(options)
    busy = psutil.getloadavg()[0]
    results = []
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as name:
        scratch = Path(name)
        checkpoint = open_checkpoint(WHEEL_MODEL, progress=options.tell)
        options.tell(f"writing the reference copy of {WHEEL_MODEL}")
        configs = _prepare(scratch, checkpoint)
        for task in tasks:
            runs: dict[str, list[HelmRun]] = {label: [] for label in SIDES}
            batches: list[float] = []
            for repeat in range(repeats):
                for label, (program, model, threads) in SIDES.items():
                    folder = scratch / f"{task.name}.{label.replace(' ', '')}.{repeat}"
                    entries = [with_model(entry, model) for entry in task.entries]
                    found = helm_run(entries, task.instances, folder, configs, threads, program=program)
                    runs[label].append(found)
                    options.tell(f"{task.name}, {label}: {found.seconds:.1f} s ({repeat + 1} of {repeats})")
                if task.padded:
                    batches.append(padded(scratch / "reference", runs[FLEXGEN[0]][-1].requests, PADDED_BATCH, scratch))
                    options.tell(f"{task.name}, transformers in batches of {PADDED_BATCH}: {batches[-1]:.1f} s")
            results.append(_result(task, runs, checkpoint, batches))
    if busy > BUSY_LOAD:
        notes.append(f"other programs were computing when this began (load {busy:.1f}): figures are noise")
    return _joined(results, notes)


def _tasks(options: Options) -> tuple[list[Task], list[str]]:
    """What is to be measured, and why something is not."""
    if options.entry:
        return [Task(options.entry.partition(":")[0], (options.entry,), options.instances or 50)], []
    found, notes = [], []
    for task in TASKS:
        instances = options.instances or (QUICK_INSTANCES if options.quick else task.instances)
        folder = data_dir()
        if task.data is not None and (folder is None or not (folder / task.data).exists()):
            notes.append(f"{task.name} is left out: FLEXGEN_HELM_DATA names no folder with {task.data}")
            continue
        found.append(replace(task, instances=instances))
    return found, notes


def with_model(entry: str, model: str) -> str:
    """A run entry without a model, for this one."""
    return f"{entry}{',' if ':' in entry else ':'}model={model}"


def helm_configs(folder: Path, max_positions: int) -> dict[str, Any]:
    """File name -> content of the entries by which HELM knows the reference copy in `folder`."""
    source = {"pretrained_model_name_or_path": str(folder)}
    client = {**source, "torch_dtype": "torch.float32", "apply_chat_template": False}
    deployment = {
        "name": REFERENCE,
        "model_name": REFERENCE,
        "tokenizer_name": REFERENCE,
        "max_sequence_length": max_positions,
        "client_spec": {"class_name": "helm.clients.huggingface_client.HuggingFaceClient", "args": client},
    }
    metadata = {
        "name": REFERENCE,
        "creator_organization_name": "reference",
        "display_name": "Hugging Face client",
        "description": "the same weights under HELM's own client",
        "access": "open",
        "release_date": None,
        "tags": ["TEXT_MODEL_TAG", "FULL_FUNCTIONALITY_TEXT_MODEL_TAG", "INSTRUCTION_FOLLOWING_MODEL_TAG"],
    }
    tokenizer: dict[str, Any] = {
        "name": REFERENCE,
        "tokenizer_spec": {"class_name": "helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer", "args": source},
    }
    return {
        "model_deployments.yaml": {"model_deployments": [deployment]},
        "model_metadata.yaml": {"models": [metadata]},
        "tokenizer_configs.yaml": {"tokenizer_configs": [tokenizer]},
    }


def _prepare(scratch: Path, checkpoint: Checkpoint) -> Path:
    """Write the reference copy and the entries that name it; returns the entries' folder."""
    folder, configs = scratch / "reference", scratch / "configs"
    export(checkpoint, folder)
    tokenizer = _tokenizer(checkpoint)
    if not same_tokens(folder, tokenizer, _SAMPLE):
        raise FlexgenError("the reference copy's tokenizer differs from ours, so the sides would not do the same work")
    content = helm_configs(folder, checkpoint.config.max_positions)
    ends = {"end_of_text_token": tokenizer.eos_text, "prefix_token": tokenizer.bos_text or tokenizer.eos_text}
    content["tokenizer_configs.yaml"]["tokenizer_configs"][0].update(ends)
    configs.mkdir()
    for name, entries in content.items():
        (configs / name).write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
    return configs


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    assert checkpoint.tokenizer_path is not None
    tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path)
    assert tokenizer is not None
    return tokenizer


def _result(
    task: Task, runs: Mapping[str, list[HelmRun]], checkpoint: Checkpoint, batches: Sequence[float]
) -> dict[str, Any]:
    """One task's part of the result."""
    rows = [_row(task, label, found) for label, found in runs.items()]
    if batches:
        label = f"{task.name}: transformers, padded batches of {PADDED_BATCH}"
        rows.append({"label": label, **summary(batches), "seconds": list(batches)})
    by_side = dict(zip(runs, rows))
    ours = min(FLEXGEN, key=lambda side: float(by_side[side]["median"]))
    theirs = min(runs.keys() - set(FLEXGEN), key=lambda side: float(by_side[side]["median"]))
    typical, reference = _typical(runs[ours]), runs[theirs][-1]
    assert typical.records, "our runs leave flexgen_run.json"
    tokenizer = _tokenizer(checkpoint)
    asked = [_fed(request, tokenizer) for request in typical.requests]
    prompts = prompt_tokens(typical.records, asked)
    bound = bound_of(typical, prompts, checkpoint.config.linear_flops_per_token)
    differing = differences(typical.stats, reference.stats)
    unexplained = [line for line in differing if line["why"] is None]
    equal = sum(a == b for a, b in zip(typical.texts, reference.texts))
    ratios = {
        "end_to_end": by_side[theirs]["median"] / by_side[ours]["median"],
        "after_the_first_request": _after(runs[theirs]) / _after(runs[ours]),
    }
    if batches:
        ratios["against_padded_batches"] = summary(batches)["median"] / by_side[ours]["median"]
    return {
        "name": task.name,
        "entries": list(task.entries),
        "instances": task.instances,
        "hardware": typical.records[0]["hardware"],
        "rows": rows,
        "ratios": ratios,
        "prompts": prompts,
        "bound": bound,
        "scores": {"compared": len(typical.stats), "differing": differing, "equal_completions": equal},
        "notes": [
            f"{task.name}: {ours} beside {theirs}; {prompts['computed']:.0f} prompt tokens computed of "
            f"{prompts['asked']:.0f} asked for, the trie has {prompts['nodes']} "
            f"({prompts['computed'] / prompts['nodes']:.2f}x); efficiency {prompts['efficiency']:.1%}",
            f"  bound: {bound['flops']:.3g} operations at {bound['flops_per_s']:.3g}/s take {bound['seconds']:.1f} s; "
            f"the run takes {bound['of_bound']:.2f} times that after a start-up of {bound['start_up_s']:.1f} s",
            f"  completions: {equal} of {len(typical.texts)} equal; metrics: {len(typical.stats) - len(differing)} "
            f"equal, {len(differing) - len(unexplained)} differ as HELM's client must, {len(unexplained)} otherwise",
            *dict.fromkeys(f"    {line['why']}" for line in differing if line["why"]),
            *(f"    {line['metric']}: {line['ours']:g}, reference {line['reference']:g}" for line in unexplained),
        ],
    }


def _joined(results: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> dict[str, Any]:
    if not results:
        raise UsageError("; ".join(notes) or "nothing to measure")
    hardware = {"machine": platform.machine(), "cores": psutil.cpu_count(logical=False), **results[0]["hardware"]}
    return {
        "name": "clients",
        "hardware": hardware,
        "versions": versions(),
        "rows": [row for result in results for row in result["rows"]],
        "ratios": {f"{result['name']}_{key}": value for result in results for key, value in result["ratios"].items()},
        "tasks": [
            {key: result[key] for key in ("name", "entries", "instances", "prompts", "bound", "scores")}
            for result in results
        ],
        "notes": [*(line for result in results for line in result["notes"]), *notes],
    }


def _typical(found: Sequence[HelmRun]) -> HelmRun:
    """The run in the middle (of an even number, the faster of the two)."""
    return sorted(found, key=lambda run: run.seconds)[(len(found) - 1) // 2]


def _after(found: Sequence[HelmRun]) -> float:
    """Seconds after the first request could be computed."""
    return float(summary([run.seconds - run.ready_s for run in found])["median"])


def _row(task: Task, label: str, found: Sequence[HelmRun]) -> dict[str, Any]:
    """request_s: of concurrent threads the times overlap, so their sum may exceed the wall time."""
    seconds = [run.seconds for run in found]
    return {
        "label": f"{task.name}: {label}",
        **summary(seconds),
        "ready_s": summary([run.ready_s for run in found])["median"],
        "request_s": summary([run.request_s for run in found])["median"],
        "seconds": seconds,
    }


def _fed(request: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a request's prompt that go through the model: the last predicts nothing where none may follow."""
    ids = tuple(tokenizer.encode(request["prompt"], add_special_tokens=False))
    return ids if request["max_tokens"] else ids[:-1]


def prompt_tokens(records: Sequence[Mapping[str, Any]], fed: Sequence[Sequence[int]]) -> dict[str, float]:
    """Prompt tokens asked for, those that were computed, the nodes of their trie, and the efficiency."""
    nodes, before = 0, tuple[int, ...]()
    for ids in sorted(tuple(each) for each in fed):
        common = next((i for i, (a, b) in enumerate(zip(before, ids)) if a != b), min(len(before), len(ids)))
        nodes += len(ids) - common
        before = ids
    totals = {
        key: sum(record["workload"][key] for record in records)
        for key in ("prompt_tokens", "prompt_tokens_computed", "output_tokens")
    }
    padded_tokens = sum(record["padded_throughput"] * record["latency_s"] for record in records)
    real_tokens = sum(record["actual_throughput"] * record["latency_s"] for record in records)
    return {
        "asked": totals["prompt_tokens"],
        "computed": totals["prompt_tokens_computed"],
        "nodes": nodes,
        "output": totals["output_tokens"],
        "efficiency": real_tokens / padded_tokens,
    }


def bound_of(run: HelmRun, prompts: Mapping[str, float], flops_per_token: float) -> dict[str, float]:
    """What the trie's nodes and the decoded tokens take at the measured product rate, and how near the run came."""
    rate = run.records[0]["hardware"]["matmul_flops"]
    done = sum(record["flops"] for record in run.records)
    flops = done - (prompts["computed"] - prompts["nodes"]) * flops_per_token
    least = flops / rate
    return {
        "flops": flops,
        "flops_per_s": rate,
        "seconds": least,
        "start_up_s": run.ready_s,
        "of_bound": (run.seconds - run.ready_s) / least,
        "fraction_of_engine": least / sum(record["latency_s"] for record in run.records),
    }


def differences(ours: Mapping[str, float], reference: Mapping[str, float]) -> list[dict[str, Any]]:
    """Metrics that both sides have and that are not equal scores; `why` is None where no known defect explains it."""
    return [
        {"metric": name, "ours": ours[name], "reference": reference[name], "why": _why(name, reference[name])}
        for name in sorted(ours.keys() & reference.keys())
        if not _equal(name, ours[name], reference[name])
    ]


def _equal(name: str, a: float, b: float) -> bool:
    return a == b or (name.startswith(tuple(_OF_CERTAINTY)) and math.isclose(a, b, rel_tol=TOLERANCE))


def _why(name: str, reference: float) -> str | None:
    """The defect of HELM's client that makes it report `reference`."""
    if name.startswith("finish_reason_"):
        return "finish_reason: HELM's Hugging Face client reports none"
    metric = next((metric for metric in _OF_CERTAINTY if name.startswith(metric)), None)
    if metric is not None and math.isclose(reference, _OF_CERTAINTY[metric], abs_tol=1e-6):
        return "log-probabilities: HELM's client takes them after dividing by a temperature of 1e-7, so all are 0"
    return None
