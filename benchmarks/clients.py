"""Whole HELM runs with our client and with HELM's own Hugging Face client: `python -m benchmarks.clients`.

HELM's client gets its best settings: float32 (its default, float16, is far slower on CPUs), the better of one and four
threads, and our very weights and tokenizer, already dequantized. Each measurement is a new process with nothing to
reuse. Prompts are sent unchanged, or with `chat` through the model's chat template by both clients. llama.cpp's server,
where it is installed, answers the same prompts from the same GGUF file over HTTP, with the better of one and eight
slots.

The result has a part for each task and peer. A later call adds its parts to those of a result file, and replaces those
that it has measured again. Each part has the date, versions, hardware and settings of its call; both sides of a ratio
are always of one call.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

import typer
import yaml

from flexgen_helm.benchmarks import llama_cpp
from flexgen_helm.benchmarks.common import BUSY_LOAD, LOAD, machine, report, script, summary
from flexgen_helm.benchmarks.helm_runs import HELM, SUITE, HelmRun, helm_run
from flexgen_helm.benchmarks.llama_cpp import SLOTS, PeerRun
from flexgen_helm.benchmarks.reference import export_checked, tokenizer_of
from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.fetch import fetch
from flexgen_helm.checkpoint.names import TEMPLATE_SUFFIXES
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.paths import data_dir
from flexgen_helm.cli.console import say
from flexgen_helm.cli.engine_flags import OutFile
from flexgen_helm.errors import UsageError
from flexgen_helm.report.throughput import versions
from flexgen_helm.tokenizer.chat import ChatFormat, ChatOptions
from flexgen_helm.tokenizer.tokenizer import Tokenizer

QUICK_INSTANCES = 5
OURS, REFERENCE = f"flexgen/{WHEEL_MODEL}", "reference/huggingface"
CHAT_REFERENCE = f"{REFERENCE}-chat"
# Scores are equal if log-probability metrics differ by at most this, relatively, and all others not at all.
TOLERANCE = 1e-4
# Log-probability metrics, and their values if every token has probability 1.
_CERTAIN_VALUES = {"logprob": 0.0, "bits_per_byte": 0.0, "perplexity": 1.0, "max_prob": 1.0}


@dataclass(frozen=True)
class Task:
    """One process of `helm-run`.

    entries: run entries, without a model.
    data: file or folder that must be in the data folder.
    chat: prompts go through the chat template.
    """

    name: str
    entries: tuple[str, ...]
    instances: int
    data: str | None = None
    chat: bool = False

    def model(self, is_ours: bool) -> str:
        """Return the model of our client or of HELM's."""
        if is_ours:
            return OURS if self.chat else f"{OURS}{TEMPLATE_SUFFIXES[False]}"
        return CHAT_REFERENCE if self.chat else REFERENCE


T = TypeVar("T")
_MMLU = ("mmlu:subject=abstract_algebra", "mmlu:subject=us_foreign_policy")
TASKS = (
    Task("mmlu", _MMLU, 1000, "mmlu"),
    Task("natural", ("synthetic_reasoning_natural:difficulty=easy",), 100),
    Task("pattern_match", ("synthetic_reasoning:mode=pattern_match",), 100),
    Task("lambada", ("lambada:mode=accuracy", "lambada:mode=perplexity"), 500, "lambada_openai_test.jsonl"),
    # HELM asks for 20 tokens here, and stops at a line's end.
    Task("long_answers", ("synthetic_reasoning_natural:difficulty=easy,stop=none,increase_max_tokens=236",), 20),
)
CHAT_TASKS = (
    Task("mmlu_chat", _MMLU, 1000, "mmlu", chat=True),
    Task("pattern_match_chat", ("synthetic_reasoning:mode=pattern_match",), 100, chat=True),
)
# Side -> program, whether the client is ours, threads.
SIDES: Mapping[str, tuple[Sequence[str], bool, int | None]] = {
    "flexgen-helm run": (SUITE, True, None),
    "helm-run with flexgen": (HELM, True, None),
    "huggingface -n 1": (HELM, False, 1),
    "huggingface -n 4": (HELM, False, 4),
}
HUGGINGFACE, LLAMA_CPP = "huggingface", "llama.cpp"
# Peer -> its settings. Each is compared with our sides of the same call.
PEERS: Mapping[str, Mapping[str, Any]] = {
    HUGGINGFACE: {"client": "HuggingFaceClient", "dtype": "float32", "threads": [1, 4]},
    LLAMA_CPP: {"program": llama_cpp.PROGRAM, "prompts": "token ids", "slots": list(SLOTS)},
}
FLEXGEN = [side for side, (_, is_ours, _) in SIDES.items() if is_ours]


def main(
    out: OutFile = None,
    tasks: Annotated[str | None, typer.Option(help=f"With commas: {', '.join(task.name for task in TASKS)}.")] = None,
    peers: Annotated[str | None, typer.Option(help=f"With commas: {', '.join(PEERS)}.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Through the model's chat template, in both clients.")] = False,
    instances: Annotated[int | None, typer.Option("--instances", "-m", help="Of all tasks.")] = None,
    repeats: int = 3,
    quick: bool = False,
) -> None:
    """Measure all sides in alternation. What the file of --out has of other tasks and peers stays.

    --quick: figures mean nothing.
    """
    earlier = _parts_of(out)
    instances, repeats = (instances or QUICK_INSTANCES, 1) if quick else (instances, repeats)
    chosen, notes = with_data(_chosen("task", tasks, {task.name: task for task in (CHAT_TASKS if chat else TASKS)}))
    sides = list(_chosen("peer", peers, {peer: peer for peer in PEERS}))
    if LLAMA_CPP in sides and (reason := llama_cpp.missing()) is not None:
        sides.remove(LLAMA_CPP)
        notes.append(f"SKIPPED, {LLAMA_CPP}: {reason}")
        say(notes[-1])
    parts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        checkpoint = open_checkpoint(WHEEL_MODEL)
        _prepare(Path(scratch), checkpoint)
        for task in chosen if sides else ():
            task = replace(task, instances=instances or task.instances)
            chat_format = ChatFormat(tokenizer_of(checkpoint), task.chat, "", ChatOptions())
            runs, served, more = _measure(task, sides, repeats, chat_format, Path(scratch))
            parts += _parts(task, runs, served)
            notes += more
    report(_joined(earlier, parts, notes), out)


def _measure(
    task: Task, peers: Sequence[str], repeats: int, chat: ChatFormat, scratch: Path
) -> tuple[dict[str, list[HelmRun]], dict[int, list[PeerRun]], list[str]]:
    """Run all sides of a task by turns. Returns runs by side, those of llama.cpp's server by slots, and notes."""
    sides = {label: side for label, side in SIDES.items() if label in FLEXGEN or HUGGINGFACE in peers}
    runs: dict[str, list[HelmRun]] = {label: [] for label in sides}
    served: dict[int, list[PeerRun]] = {}
    reason = None
    for repeat in range(repeats):
        for label, (program, is_ours, threads) in sides.items():
            folder = scratch / f"{task.name}.{label.replace(' ', '')}.{repeat}"
            entries = [with_model(entry, task.model(is_ours)) for entry in task.entries]
            run = helm_run(entries, task.instances, folder, scratch / "configs", threads, program=program)
            runs[label].append(run)
            say(f"{task.name}, {label}: {run.seconds:.1f} s ({repeat + 1} of {repeats})")
        if LLAMA_CPP not in peers:
            continue
        requests = runs[FLEXGEN[0]][-1].requests
        if (reason := llama_cpp.unsupported(requests)) is not None:
            continue
        ids = [_prompt_ids(request, chat) for request in requests]
        for slots in SLOTS:
            log = scratch / f"{task.name}.{slots}.{repeat}.txt"
            answered = llama_cpp.serve(fetch(WHEEL_MODEL), ids, requests, slots, log)
            served.setdefault(slots, []).append(answered)
            say(f"{task.name}, {LLAMA_CPP}, {slots} slots: {answered.seconds:.1f} s")
    return runs, served, [f"{task.name} is not compared with {LLAMA_CPP}: {reason}"] if reason else []


def _parts_of(out: Path | None) -> list[dict[str, Any]]:
    """Return the parts of the result in a file. Raises `UsageError` where it has none of this kind."""
    if out is None or not out.exists():
        return []
    with suppress(ValueError, KeyError, TypeError):
        parts: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["tasks"]
        if all("peer" in part for part in parts):
            return parts
    raise UsageError(f"--out {out} has no parts to add to: name a new file")


def _chosen(kind: str, names: str | None, known: Mapping[str, T]) -> list[T]:
    """Return what is known by the names with commas between; all where they are None. Raises `UsageError`."""
    try:
        return [known[name] for name in (names.split(",") if names is not None else known)]
    except KeyError as error:
        raise UsageError(f"there is no {kind} {error}; known are {', '.join(known)}") from None


def with_data(tasks: Sequence[Task]) -> tuple[list[Task], list[str]]:
    """Return the tasks whose data is here, and notes on the others."""
    folder = data_dir()
    here = [task for task in tasks if task.data is None or (folder is not None and (folder / task.data).exists())]
    return here, [
        f"{task.name} is left out: FLEXGEN_HELM_DATA names no folder with {task.data}"
        for task in tasks
        if task not in here
    ]


def with_model(entry: str, model: str) -> str:
    return f"{entry}{',' if ':' in entry else ':'}model={model}"


def helm_configs(folder: Path, max_positions: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return HELM's configuration files (name -> content) for the reference copy in `folder`.

    It is there twice: `REFERENCE` without a chat template, `CHAT_REFERENCE` with it. Windows are as long as ours.
    tokenizer: that of the copy, read by us.
    """
    source = {"pretrained_model_name_or_path": str(folder)}
    deployments = [
        {
            "name": name,
            "model_name": name,
            "tokenizer_name": REFERENCE,
            "max_sequence_length": max_positions,
            "max_request_length": max_positions + 1,
            "client_spec": {
                "class_name": "helm.clients.huggingface_client.HuggingFaceClient",
                "args": {
                    **source,
                    "torch_dtype": "torch.float32",
                    "apply_chat_template": name == CHAT_REFERENCE,
                    "end_of_text_token": tokenizer.eos_text,  # otherwise it stays in the completion
                },
            },
        }
        for name in (REFERENCE, CHAT_REFERENCE)
    ]
    models = [
        {
            "name": name,
            "creator_organization_name": "reference",
            "display_name": "Hugging Face client",
            "description": "the same weights under HELM's own client",
            "access": "open",
            "release_date": None,
            "tags": ["TEXT_MODEL_TAG", "FULL_FUNCTIONALITY_TEXT_MODEL_TAG", "INSTRUCTION_FOLLOWING_MODEL_TAG"],
        }
        for name in (REFERENCE, CHAT_REFERENCE)
    ]
    tokenizer_config: dict[str, Any] = {
        "name": REFERENCE,
        "tokenizer_spec": {"class_name": "helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer", "args": source},
        "end_of_text_token": tokenizer.eos_text,
        "prefix_token": tokenizer.bos_text or tokenizer.eos_text,
    }
    return {
        "model_deployments.yaml": {"model_deployments": deployments},
        "model_metadata.yaml": {"models": models},
        "tokenizer_configs.yaml": {"tokenizer_configs": [tokenizer_config]},
    }


def _prepare(scratch: Path, checkpoint: Checkpoint) -> None:
    """Write the reference copy to `reference`, and HELM's configuration files for it to `configs`."""
    tokenizer = export_checked(checkpoint, scratch / "reference")
    content = helm_configs(scratch / "reference", checkpoint.config.max_positions, tokenizer)
    (scratch / "configs").mkdir()
    for name, entries in content.items():
        (scratch / "configs" / name).write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")


def _parts(
    task: Task,
    runs: Mapping[str, list[HelmRun]],
    served: Mapping[int, Sequence[PeerRun]],
) -> list[dict[str, Any]]:
    """Return a part of the result for each peer.

    served: slots of llama.cpp's server -> runs.
    """
    rows = {label: _row(task, label, repeats) for label, repeats in runs.items()}
    ours = _fastest(rows, FLEXGEN)
    by_duration = sorted(runs[ours], key=lambda run: run.seconds)
    typical = by_duration[(len(by_duration) - 1) // 2]  # of an even number, the faster one
    assert typical.records, "our runs write flexgen_run.json"
    prompts = prompt_tokens(typical.records)
    found: dict[str, dict[str, Any]] = {}
    if peer_sides := [label for label in runs if label not in FLEXGEN]:
        theirs = _fastest(rows, peer_sides)
        scores, lines = _compared_scores(typical, runs[theirs][-1])
        found[HUGGINGFACE] = {
            "rows": [rows[label] for label in peer_sides],
            "ratios": {
                "end_to_end": rows[theirs]["median"] / rows[ours]["median"],
                "after_the_first_request": _seconds_after_ready(runs[theirs]) / _seconds_after_ready(runs[ours]),
            },
            "scores": scores,
            "notes": [
                f"{task.name}: {ours} against {theirs}; {prompts['computed']:.0f} of {prompts['asked']:.0f} requested "
                f"prompt tokens were computed; efficiency {prompts['efficiency']:.1%}",
                *lines,
            ],
        }
    if served:
        found[LLAMA_CPP] = llama_cpp.compare(task.name, typical, rows[ours], served)
    common = {
        "name": task.name,
        "entries": list(task.entries),
        "instances": task.instances,
        "date": date.today().isoformat(),
        "hardware": {**machine(), **typical.records[0]["hardware"]},
        "load": LOAD,
        "versions": versions(),
        "prompts": prompts,
    }
    busy = [f"  {task.name} was measured on a busy machine (load {LOAD:.1f})"] if LOAD > BUSY_LOAD else []
    return [
        {
            **common,
            "peer": peer,
            **part,
            "rows": [*(rows[label] for label in FLEXGEN), *part["rows"]],
            "notes": part["notes"] + busy,
            "settings": {"repeats": len(runs[ours]), **PEERS[peer]},
        }
        for peer, part in found.items()
    ]


def _compared_scores(ours: HelmRun, reference: HelmRun) -> tuple[dict[str, Any], list[str]]:
    """Compare metrics and completions with HELM's client; returns `scores` of a part, and its notes."""
    num_compared = len(ours.stats.keys() | reference.stats.keys())
    differing = differences(ours.stats, reference.stats)
    unexplained = [line for line in differing if line["why"] is None]
    equal = sum(a == b for a, b in zip(ours.texts, reference.texts))
    lines = [
        f"  completions: {equal} of {len(ours.texts)} equal; metrics: {num_compared - len(differing)} "
        f"equal, {len(differing) - len(unexplained)} differ as HELM's client must, {len(unexplained)} otherwise",
        *dict.fromkeys(f"    {line['why']}" for line in differing if line["why"]),
        *(f"    {line['metric']}: {line['ours']}, reference {line['reference']}" for line in unexplained),
    ]
    return {"compared": num_compared, "differing": differing, "equal_completions": equal}, lines


def _fastest(rows: Mapping[str, Mapping[str, Any]], sides: Iterable[str]) -> str:
    return min(sides, key=lambda side: float(rows[side]["median"]))


def _joined(
    earlier: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]], notes: Sequence[str]
) -> dict[str, Any]:
    """Return the result of all parts. One that was measured again takes the place of the earlier one.

    hardware, versions: of the last call.
    """
    if not measured:
        raise UsageError("; ".join(notes) or "nothing to measure: no chosen task is compared with a chosen peer")
    parts = list({(part["name"], part["peer"]): part for part in (*earlier, *measured)}.values())
    rows: list[Any] = []
    for part in parts:  # parts of one call share our rows
        rows += [row for row in part["rows"] if row not in rows]
    return {
        "name": "clients",
        "hardware": measured[0]["hardware"],
        "versions": measured[0]["versions"],
        "rows": rows,
        "ratios": {f"{part['name']}_{key}": value for part in parts for key, value in part["ratios"].items()},
        "tasks": parts,
        "notes": [*(line for part in parts for line in part["notes"]), *notes],
    }


def _seconds_after_ready(runs: Sequence[HelmRun]) -> float:
    return median(run.seconds - run.ready_s for run in runs)


def _row(task: Task, label: str, runs: Sequence[HelmRun]) -> dict[str, Any]:
    """Return a row of the result. The request_s of concurrent threads overlap and may exceed the wall time."""
    seconds = [run.seconds for run in runs]
    return {
        "label": f"{task.name}: {label}",
        **summary(seconds),
        "ready_s": median(run.ready_s for run in runs),
        "request_s": median(run.request_s for run in runs),
        "seconds": seconds,
    }


def _prompt_ids(request: Mapping[str, Any], chat: ChatFormat) -> Sequence[int]:
    text = chat.render_prompt(request["prompt"]) if chat.applied else request["prompt"]
    return chat.tokenizer.encode(text, add_special_tokens=False)


def prompt_tokens(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Count requested and computed prompt tokens, and output tokens; also the efficiency."""
    workloads = [record["workload"] for record in records]
    padded_tokens = sum(record["padded_throughput"] * record["latency_s"] for record in records)
    real_tokens = sum(record["actual_throughput"] * record["latency_s"] for record in records)
    return {
        "asked": sum(workload["prompt_tokens"] for workload in workloads),
        "computed": sum(workload["prompt_tokens_computed"] for workload in workloads),
        "output": sum(workload["output_tokens"] for workload in workloads),
        "efficiency": real_tokens / padded_tokens,
    }


def differences(ours: Mapping[str, float], reference: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the metrics that are not equal, or that one side lacks (None).

    `why` is None if no known defect of HELM's client explains it.
    """
    differing = []
    for name in sorted(ours.keys() | reference.keys()):
        a, b, metric = ours.get(name), reference.get(name), name.rpartition(": ")[2]  # without the run's entry
        if a is None or b is None or not _equal(metric, a, b):
            differing.append({"metric": name, "ours": a, "reference": b, "why": _why(metric, a, b)})
    return differing


def _equal(name: str, a: float, b: float) -> bool:
    of_logprobs = name.startswith(tuple(_CERTAIN_VALUES)) or name.partition(" ")[0].endswith("_perplexity")
    return a == b or (of_logprobs and math.isclose(a, b, rel_tol=TOLERANCE))


def _why(name: str, ours: float | None, reference: float | None) -> str | None:
    """Return the defect of HELM's client that explains its value `reference`."""
    if name.startswith("finish_reason_"):
        return "finish_reason: HELM's Hugging Face client reports none"
    if reference is None:
        is_calibration = name.startswith(("ece_", "platt_", "selective_"))
        return "calibration: HELM leaves it out where all probabilities are 1" if is_calibration else None
    metric = next((metric for metric in _CERTAIN_VALUES if name.startswith(metric)), None)
    if metric is not None and math.isclose(reference, _CERTAIN_VALUES[metric], abs_tol=1e-6):
        return "log-probabilities: HELM's client takes them after dividing by a temperature of 1e-7, so all are 0"
    if name.startswith("num_bytes") and ours is not None and reference > ours:
        return "num_bytes: HELM's client decodes token by token, and counts 3 bytes for each part of a character"
    return None


if __name__ == "__main__":
    script(main)
