"""Whole HELM runs with our client, HELM's for Hugging Face, and llama.cpp's server:
`python -m benchmarks.clients`.

HELM's client gets its best settings: float32 (its default, float16, is far slower on CPUs), the
better of one and four threads, and our very weights and tokenizer, already dequantized. Each
measurement is a new process with nothing to reuse. Prompts are sent unchanged, or with `--chat`
through the model's chat template by both clients. llama.cpp's server, where it is installed,
answers the same prompts from the same GGUF file over HTTP, with the better of one and eight slots.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from flexgen_helm.benchmarks import llama_cpp
from flexgen_helm.benchmarks.common import choose, report, script, summary
from flexgen_helm.benchmarks.helm_runs import HELM, SUITE, HelmRun, helm_run
from flexgen_helm.benchmarks.reference import export_checked, tokenizer_of
from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.fetch import fetch
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.suffixes import TEMPLATE_SUFFIXES
from flexgen_helm.cli.arguments import OutFile
from flexgen_helm.errors import UsageError
from flexgen_helm.paths import data_dir
from flexgen_helm.tokenizer.chat import ChatFormat, ChatOptions
from flexgen_helm.tokenizer.tokenizer import Tokenizer

OURS, REFERENCE = f"flexgen/{WHEEL_MODEL}", "reference/huggingface"
CHAT_REFERENCE = f"{REFERENCE}-chat"
# Scores are equal if log-probability metrics differ by at most this, relatively, and all others not
# at all.
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

    @property
    def models(self) -> tuple[str, str]:
        """The model of our client and of HELM's."""
        if self.chat:
            return OURS, CHAT_REFERENCE
        return f"{OURS}{TEMPLATE_SUFFIXES[False]}", REFERENCE


_MMLU = ("mmlu:subject=abstract_algebra", "mmlu:subject=us_foreign_policy")
_PATTERNS = ("synthetic_reasoning:mode=pattern_match",)
_NATURAL = "synthetic_reasoning_natural:difficulty=easy"
TASKS = (
    Task("mmlu", _MMLU, 1000, "mmlu"),
    Task("natural", (_NATURAL,), 100),
    Task("pattern_match", _PATTERNS, 100),
    Task(
        "lambada",
        ("lambada:mode=accuracy", "lambada:mode=perplexity"),
        500,
        "lambada_openai_test.jsonl",
    ),
    # HELM asks for 20 tokens here, and stops at a line's end.
    Task("long_answers", (f"{_NATURAL},stop=none,increase_max_tokens=236",), 20),
)
CHAT_TASKS = (
    Task("mmlu_chat", _MMLU, 1000, "mmlu", chat=True),
    Task("pattern_match_chat", _PATTERNS, 100, chat=True),
)
FLEXGEN, HUGGINGFACE, LLAMA_CPP = "flexgen", "huggingface", "llama.cpp"
# Side of a comparison, by who computes: the program and its threads, or the slots of a server.
SIDES: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    FLEXGEN: {"flexgen-helm run": (SUITE, None), "helm-run with flexgen": (HELM, None)},
    HUGGINGFACE: {"huggingface -n 1": (HELM, 1), "huggingface -n 4": (HELM, 4)},
    LLAMA_CPP: {f"llama.cpp's server, {slots} slots": (None, slots) for slots in (1, 8)},
}


def main(
    out: OutFile = None,
    tasks: str = "",
    peers: str = f"{HUGGINGFACE},{LLAMA_CPP}",
    chat: bool = False,
    instances: int = 0,
    repeats: int = 3,
) -> None:
    """Measure all sides in alternation. tasks, peers: names with commas between. instances: of all
    tasks.
    """
    known = {task.name: task for task in (CHAT_TASKS if chat else TASKS)}
    chosen, notes = with_data(
        [choose("task", name, known) for name in (tasks.split(",") if tasks else known)]
    )
    sides = {
        peer: choose("peer", peer, SIDES) for peer in (FLEXGEN, *filter(None, peers.split(",")))
    }
    if LLAMA_CPP in sides and (reason := llama_cpp.missing()) is not None:
        del sides[LLAMA_CPP]
        notes.append(f"{LLAMA_CPP} is left out: {reason}")
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        checkpoint = open_checkpoint(WHEEL_MODEL)
        _prepare(Path(scratch), checkpoint)
        parts = []
        for task in chosen:
            task = replace(task, instances=instances or task.instances)
            runs = _measure(task, sides, repeats, checkpoint, Path(scratch))
            parts.append(_part(task, sides, runs))
    if not parts:
        raise UsageError("; ".join(notes))
    result = {
        "name": "clients",
        "hardware": parts[0]["hardware"],
        "rows": [row for part in parts for row in part.pop("rows")],
        "ratios": {key: value for part in parts for key, value in part.pop("ratios").items()},
        "notes": [*(note for part in parts for note in part.pop("notes")), *notes],
        "tasks": parts,
    }
    report(result, out)


def with_data(tasks: Sequence[Task]) -> tuple[list[Task], list[str]]:
    """Return the tasks whose data is here, and notes on the others."""
    folder = data_dir() or Path("data")
    absent = [task for task in tasks if task.data is not None and not (folder / task.data).exists()]
    return [task for task in tasks if task not in absent], [
        f"{task.name} is left out: FLEXGEN_HELM_DATA names no folder with {task.data}"
        for task in absent
    ]


def _measure(
    task: Task,
    sides: Mapping[str, Mapping[str, tuple[Any, Any]]],
    repeats: int,
    checkpoint: Checkpoint,
    scratch: Path,
) -> dict[str, list[HelmRun]]:
    """Run all sides of a task by turns, and return their runs."""
    runs: dict[str, list[HelmRun]] = {side: [] for group in sides.values() for side in group}
    chat = ChatFormat(tokenizer_of(checkpoint), task.chat, "", ChatOptions())
    for repeat, (side, measured) in product(range(repeats), runs.items()):
        folder = scratch / f"{task.name}.{repeat}.{[*runs].index(side)}"
        peer = next(peer for peer, group in sides.items() if side in group)
        program, number = SIDES[peer][side]
        if peer == LLAMA_CPP:
            requests = next(iter(runs.values()))[-1].requests
            if llama_cpp.unsupported(requests) is not None:
                continue
            ids = [_prompt_ids(request, chat) for request in requests]
            run = llama_cpp.serve(fetch(WHEEL_MODEL), ids, requests, number, folder)
        else:
            model = task.models[peer == HUGGINGFACE]
            entries = [with_model(entry, model) for entry in task.entries]
            configs = scratch / "configs"
            run = helm_run(entries, task.instances, folder, configs, number, program=program)
        measured.append(run)
        print(f"{task.name}, {side}: {run.seconds:.1f} s ({repeat + 1} of {repeats})")
    return runs


def _part(
    task: Task,
    sides: Mapping[str, Mapping[str, Any]],
    runs: Mapping[str, Sequence[HelmRun]],
) -> dict[str, Any]:
    """Return a task's part of the result: rows, ratios, notes, and what was asked for and
    computed.
    """
    rows = {side: _row(task, side, repeats) for side, repeats in runs.items() if repeats}
    best = {
        peer: min(measured, key=lambda side: float(rows[side]["median"]))
        for peer, group in sides.items()
        if (measured := [side for side in group if side in rows])
    }
    ours = best.pop(FLEXGEN)
    typical = sorted(runs[ours], key=lambda run: run.seconds)[(len(runs[ours]) - 1) // 2]
    prompts = prompt_tokens(typical.records)
    ratios: dict[str, float] = {}
    notes = [
        f"{task.name}, {ours}: {prompts['computed']:.0f} of {prompts['asked']:.0f} requested "
        f"prompt tokens were computed; efficiency {prompts['efficiency']:.1%}"
    ]
    differing: list[dict[str, Any]] = []
    for peer, side in best.items():
        ratios[f"{task.name}_{peer}"] = rows[side]["median"] / rows[ours]["median"]
        after = _seconds_after_ready(runs[side]) / _seconds_after_ready(runs[ours])
        ratios[f"{task.name}_{peer}_after_start_up"] = after
        texts = runs[side][-1].texts
        equal = sum(a == b for a, b in zip(typical.texts, texts, strict=True))
        notes.append(f"  against {side}: {equal} of {len(texts)} completions equal")
        if peer == HUGGINGFACE:
            differing = differences(typical.stats, runs[side][-1].stats)
            notes += [f"    {line}" for line in dict.fromkeys(map(_told, differing))]
    return {
        "name": task.name,
        "entries": list(task.entries),
        "instances": task.instances,
        "hardware": typical.records[0]["hardware"],
        "prompts": prompts,
        "differing": differing,
        "rows": list(rows.values()),
        "ratios": ratios,
        "notes": notes,
    }


def _row(task: Task, side: str, runs: Sequence[HelmRun]) -> dict[str, Any]:
    """Return a row of the result. The request_s of concurrent threads overlap, so may be longer."""
    seconds = [run.seconds for run in runs]
    medians = {key: median(getattr(run, key) for run in runs) for key in ("ready_s", "request_s")}
    return {"label": f"{task.name}: {side}", **summary(seconds), **medians, "seconds": seconds}


def _seconds_after_ready(runs: Sequence[HelmRun]) -> float:
    return median(run.seconds - run.ready_s for run in runs)


def _told(line: Mapping[str, Any]) -> str:
    return line["why"] or f"{line['metric']}: {line['ours']}, reference {line['reference']}"


def with_model(entry: str, model: str) -> str:
    return f"{entry}{',' if ':' in entry else ':'}model={model}"


def helm_configs(folder: Path, max_positions: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return HELM's configuration files (name -> content) for the reference copy in `folder`.

    It is there twice: `REFERENCE` without a chat template, `CHAT_REFERENCE` with it. Windows are as
    long as ours.
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
    described = {
        "creator_organization_name": "reference",
        "display_name": "Hugging Face client",
        "description": "the same weights under HELM's own client",
        "access": "open",
        "release_date": None,
        "tags": ["TEXT_MODEL_TAG", "INSTRUCTION_FOLLOWING_MODEL_TAG"],
    }
    models = [{"name": name, **described} for name in (REFERENCE, CHAT_REFERENCE)]
    tokenizer_config: dict[str, Any] = {
        "name": REFERENCE,
        "tokenizer_spec": {
            "class_name": ("helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer"),
            "args": source,
        },
        "end_of_text_token": tokenizer.eos_text,
        "prefix_token": tokenizer.bos_text or tokenizer.eos_text,
    }
    return {
        "model_deployments.yaml": {"model_deployments": deployments},
        "model_metadata.yaml": {"models": models},
        "tokenizer_configs.yaml": {"tokenizer_configs": [tokenizer_config]},
    }


def _prepare(scratch: Path, checkpoint: Checkpoint) -> None:
    """Write the reference copy to `reference`, and HELM's configuration files for it to
    `configs`.
    """
    tokenizer = export_checked(checkpoint, scratch / "reference")
    content = helm_configs(scratch / "reference", checkpoint.config.max_positions, tokenizer)
    (scratch / "configs").mkdir()
    for name, entries in content.items():
        (scratch / "configs" / name).write_text(
            yaml.safe_dump(entries, sort_keys=False), encoding="utf-8"
        )


def _prompt_ids(request: Mapping[str, Any], chat: ChatFormat) -> Sequence[int]:
    text = chat.render_prompt(request["prompt"]) if chat.applied else request["prompt"]
    return chat.tokenizer.encode(text, add_special_tokens=False)


def prompt_tokens(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Count requested and computed prompt tokens; also the efficiency."""
    workloads = [record["workload"] for record in records]
    padded_tokens = sum(record["padded_throughput"] * record["latency_s"] for record in records)
    real_tokens = sum(record["actual_throughput"] * record["latency_s"] for record in records)
    return {
        "asked": sum(workload["prompt_tokens"] for workload in workloads),
        "computed": sum(workload["prompt_tokens_computed"] for workload in workloads),
        "efficiency": real_tokens / padded_tokens,
    }


def differences(ours: Mapping[str, float], reference: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the metrics that are not equal, or that one side lacks (None).

    `why` is None if no known defect of HELM's client explains it.
    """
    differing = []
    for name in sorted(ours.keys() | reference.keys()):
        # without the run's entry
        a, b, metric = ours.get(name), reference.get(name), name.rpartition(": ")[2]
        if a is None or b is None or not _equal(metric, a, b):
            differing.append({"metric": name, "ours": a, "reference": b, "why": _why(metric, a, b)})
    return differing


def _equal(name: str, a: float, b: float) -> bool:
    of_logprobs = name.startswith(tuple(_CERTAIN_VALUES)) or name.partition(" ")[0].endswith(
        "_perplexity"
    )
    return a == b or (of_logprobs and math.isclose(a, b, rel_tol=TOLERANCE))


def _why(name: str, ours: float | None, reference: float | None) -> str | None:
    """Return the defect of HELM's client that explains its value `reference`."""
    if name.startswith("finish_reason_"):
        return "finish_reason: HELM's Hugging Face client reports none"
    if reference is None:
        is_calibration = name.startswith(("ece_", "platt_", "selective_"))
        return (
            "calibration: HELM leaves it out where all probabilities are 1"
            if is_calibration
            else None
        )
    metric = next((metric for metric in _CERTAIN_VALUES if name.startswith(metric)), None)
    if metric is not None and math.isclose(reference, _CERTAIN_VALUES[metric], abs_tol=1e-6):
        return (
            "log-probabilities: HELM's client takes them after dividing by a temperature of 1e-7, "
            "so all are 0"
        )
    if name.startswith("num_bytes") and ours is not None and reference > ours:
        return (
            "num_bytes: HELM's client decodes token by token, and counts 3 bytes for each part of "
            "a character"
        )
    return None


if __name__ == "__main__":
    script(main)
