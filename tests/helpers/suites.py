"""Folders of runs as HELM writes them."""

from __future__ import annotations

import json


def stat(name, value, split="test"):
    return {"name": {"name": name, "split": split}, "count": 1, "sum": value, "mean": value}


def write_run(suite, name, precision, scores, instances, model="tiny", tokens=1000, latency=2.0, reused=0):
    """scores: of `stats.json`; instances: id -> statistic -> value."""
    suffix = "" if precision == "fp16" else f"-{precision}"
    folder = suite / f"{name},model=flexgen_{model}{suffix}"
    folder.mkdir(parents=True)
    entries = [
        {"instance_id": key, "train_trial_index": 0, "stats": [stat(n, v) for n, v in stats.items()]}
        for key, stats in instances.items()
    ]
    perturbed = {
        "instance_id": next(iter(instances)), "train_trial_index": 0, "perturbation": {"name": "typos"},
        "stats": [{**stat("exact_match", 7.0), "name": {"name": "exact_match", "split": "test", "perturbation": {}}}],
    }  # fmt: skip
    record = {
        "model": model + suffix,
        "precision": precision,
        "latency_s": latency,
        "workload": {"prompt_tokens": tokens, "num_unique": len(instances)},
        "num_reused": reused,
    }
    for file, content in (
        ("stats.json", [stat(n, v) for n, v in scores.items()]),
        ("per_instance_stats.json", [*entries, perturbed]),
        ("flexgen_run.json", record),
    ):
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder


def accuracies(right):
    return {f"id{i}": {"exact_match": float(x)} for i, x in enumerate(right)}
