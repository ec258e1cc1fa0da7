"""Folders of runs as HELM writes them."""

from __future__ import annotations

import json

import numpy as np

from flexgen_helm.report.block_records import BLOCK_KEYS
from flexgen_helm.report.throughput import throughput
from flexgen_helm.request import Cost
from tests.helpers.fake_engine import USAGE


def stat(name, value, split="test"):
    return {"name": {"name": name, "split": split}, "count": 1, "sum": value, "mean": value}


def request_state(key, text, answer="", logprob=-1.0, **more):
    """A request of an instance and its answer, as `scenario_state.json` has it."""
    references = [
        {"output": {"text": f"right {key}"}, "tags": ["correct"]},
        {"output": {"text": "wrong"}, "tags": []},
    ]
    completion = {
        "text": answer,
        "logprob": logprob,
        "tokens": [{"text": answer, "logprob": logprob}],
    }
    return {
        "instance": {"input": {"text": text}, "references": references, "split": "test", "id": key},
        "train_trial_index": 0,
        "request": {"prompt": f"Question: {text}", "echo_prompt": False},
        "result": {"success": True, "completions": [completion]},
        **more,
    }


def write_run(
    suite, name, precision, scores, instances, model="tiny", tokens=1000, latency=2.0, reused=0,
    texts=None,
    states=None, adapter=None, **record_more,
):  # fmt: skip
    """scores: of `stats.json`; instances: id -> statistic -> value; texts: id -> text, else one of
    the run's own.

    states: of `scenario_state.json`, without HELM's indents, which take most of the time; made of
        the texts if None.
    adapter: of `run_spec.json`.
    """
    suffix = "" if precision == "fp16" else f"-{precision}"
    folder = suite / f"{name},model=flexgen_{model}{suffix}"
    folder.mkdir(parents=True)
    entries = [
        {
            "instance_id": key,
            "train_trial_index": 0,
            "stats": [stat(n, v) for n, v in stats.items()],
        }
        for key, stats in instances.items()
    ]
    perturbed = {
        "instance_id": next(iter(instances)), "train_trial_index": 0,
        "perturbation": {"name": "typos"},
        "stats": [{**stat("exact_match", 7.0), "name": {"name": "exact_match", "split": "test", "perturbation": {}}}],
    }  # fmt: skip
    record = {
        "model": model + suffix,
        "precision": precision,
        "latency_s": latency,
        "workload": {"prompt_tokens": tokens, "num_unique": len(instances)},
        "num_reused": reused,
        **record_more,
    }
    states = states or [
        request_state(key, (texts or {}).get(key, f"{name} {key}")) for key in instances
    ]
    spec = {
        "name": folder.name,
        "adapter_spec": {"model": model, "num_train_trials": 1, **(adapter or {})},
        "scenario_spec": {"args": {}},
    }
    (folder / "scenario_state.json").write_text(
        json.dumps({"request_states": states}), encoding="utf-8"
    )
    for file, content in (
        ("stats.json", [stat(n, v) for n, v in scores.items()]),
        ("per_instance_stats.json", [*entries, perturbed]),
        ("flexgen_run.json", record),
        ("run_spec.json", spec),
    ):
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder


def accuracies(right):
    return {f"id{i}": {"exact_match": float(x)} for i, x in enumerate(right)}


def write_mmlu(suite, num_subjects=57, models=("tiny",), instances=12):
    """Runs of many subjects in two precisions, with the records and the totals of the suite that
    the engine leaves.
    """
    draw = np.random.default_rng(0)
    for model in models:
        for subject in range(num_subjects):
            base = (draw.random(instances) < 0.5).astype(float)
            entry = f"mmlu:subject=high_school_government_and_politics_{subject},method=multiple_choice_joint"
            for precision in ("fp16", "4bit"):
                right = (
                    base
                    if precision == "fp16"
                    else np.where(draw.random(instances) < 0.2, 0.0, base)
                )
                folder = write_run(
                    suite, entry, precision, {"exact_match": right.mean()}, accuracies(right), model
                )
                add_record(folder, [Cost(300 + 10 * i, 100.0, 2) for i in range(instances)], 1.5)
    write_totals(suite)


def add_record(folder, costs, seconds, **more):
    """Complete the record of a run as the engine writes it."""
    path = folder / "flexgen_run.json"
    record = {
        **json.loads(path.read_text()),
        **throughput(costs, seconds),
        "hardware": {"device": "cpu", "name": (
            "A processor with a long name, 2.4 GHz, of a maker"
        ), "threads": 2,
                     "compute_dtype": "float32", "matmul_flops": 1e11, "memory_bytes": 16 << 30},
        "limit_bytes": {"gpu": 0, "cpu": 4 << 30, "disk": 50 << 30},
        "versions": {"python": "3.11.7", "flexgen-helm": "0.1.0", "crfm-helm": "0.5.16", "torch": "2.10.0"},
        "finished_at": "2026-01-02T03:04:05+00:00",
        **more,
    }  # fmt: skip
    record["workload"] |= {"num_requests": len(costs), "num_unique": len(costs)}
    path.write_text(json.dumps(record), encoding="utf-8")


def write_totals(suite, failed=(), **more):
    """Write into every run what its model's block took, and `flexgen_suite.json`."""
    read = {"weights": 3 << 30, "cache": 0, "activations": 0}
    usage = {
        **USAGE,
        "schedule": "zigzag",
        "bytes": {**USAGE["bytes"], "disk_to_cpu": read},
        **more,
    }
    block = {key: value for key, value in usage.items() if key in BLOCK_KEYS}
    for path in suite.glob("*/flexgen_run.json"):
        path.write_text(json.dumps({**block, **json.loads(path.read_text())}))
    (suite / "flexgen_suite.json").write_text(json.dumps({"failed": list(failed)}))
