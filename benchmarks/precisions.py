"""`bench precisions`: what each precision takes and costs, on one model.

- bytes of the weights, and bits of a value of the cache;
- seconds behind a link of 0.25 GB/s under the same memory limits, with random weights of the model's shapes;
- token perplexity and divergence from FP16, over windows of 1,024 tokens of WikiText-2;
- LAMBADA's accuracy, and the answers that changed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_helm.benchmarks import Options
from flexgen_helm.benchmarks.common import machine, refuse_engine_flags
from flexgen_helm.benchmarks.packed import Case, case_rows
from flexgen_helm.benchmarks.texts import LastWord, last_words, wikitext_and_lambada
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.placement import StorageSizes
from flexgen_helm.quant.precisions import FP16, PRECISIONS
from flexgen_helm.report.divergence import Divergence
from flexgen_helm.report.throughput import versions

if TYPE_CHECKING:
    from flexgen_helm.engine.divergence import ComparedPrompts
    from flexgen_helm.engine.engine import Engine

MODEL = "smollm2-135m-instruct-q4_1"
MEASURED = ("8bit", "4bit-weights", "4bit-cache", "4bit")
WINDOWS, WINDOW, PASSAGES = 12, 1024, 400
LINK = Case("behind 0.25 GB/s", "link", 4, 64, 8, (0.25, 0.25), precisions=MEASURED)
_COMPUTE_BYTES = 4
_MB = 1e6


def run(options: Options) -> dict[str, Any]:
    """Rows are precisions, FP16 first; `median` is of the offloaded run's seconds."""
    refuse_engine_flags("precisions", options)
    model = options.model or MODEL
    text, lines = wikitext_and_lambada("precisions")
    windows, passages = (1, 4) if options.quick else (WINDOWS, options.instances or PASSAGES)
    repeats = 1 if options.quick else options.repeats or 3
    config = read_model_config(model)[0]
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        timed = case_rows(model, config, Path(scratch), repeats, LINK, options.tell)
        answers, found = evaluate(model, text, lines[:passages], windows, Path(scratch), options)
    rows = [
        {"label": name, **sizes(name, config), **_speed(row, timed[0]), **_quality(name, found, answers)}
        for name, row in zip((FP16.name, *MEASURED), timed)
    ]
    return {
        "name": "precisions",
        "workload": {"model": model, "windows": windows, "window": WINDOW, "passages": passages},
        "hardware": {**machine(), "device": "cpu"},
        "versions": versions(),
        "rows": rows,
        "ratios": {f"{row['label']}_link".replace("-", "_"): row["times_faster"] for row in rows[1:]},
        "notes": [
            f"seconds: {LINK.rows} sequences of {LINK.prompt} + {LINK.output} tokens {LINK.label}, with room for a "
            "quarter of the FP16 weights",
            "kl, kl_p99: mean and 99th percentile of the divergence from FP16, in nats",
            "lost, won: answers that FP16 has right, or wrong; changed: other wrong answers",
        ],
    }


def evaluate(
    model: str, text: str, passages: Sequence[str], windows: int, scratch: Path, options: Options
) -> tuple[dict[str, list[LastWord]], dict[str, Divergence]]:
    """Return the answers of each precision, FP16's too, and the divergence of each from FP16."""
    from flexgen_helm import Engine
    from flexgen_helm.cli.divergence import describe, measure, text_windows

    answers: dict[str, list[LastWord]] = {}

    @contextmanager
    def load(precision: str) -> Iterator[Engine]:
        with Engine.from_pretrained(model, precision=precision, device="cpu", offload_dir=str(scratch)) as engine:
            answers[precision] = last_words(engine, passages)
            options.tell(f"{precision}, LAMBADA: {flips(answers[FP16.name], answers[precision])}")
            yield engine

    def prompts(engine: Engine) -> dict[str, ComparedPrompts]:
        return {"": text_windows(engine, text, WINDOW, windows)}

    found = {}
    for _, divergence in measure(load, [FP16.name, *MEASURED], prompts, folder=scratch):
        options.tell(describe(divergence))
        found[divergence.precision] = divergence
    return answers, found


def sizes(precision: str, config: ModelConfig) -> dict[str, float]:
    """{weights_mb, of_fp16, cache_bits}: of all matrices, and of a value of the cache beside a CPU's float32."""
    weights, whole = (sum(StorageSizes(config, PRECISIONS[name]).matrices.values()) for name in (precision, FP16.name))
    cache = PRECISIONS[precision].cache
    bits = 8 * (_COMPUTE_BYTES if cache is None else cache.bytes_per_value(_COMPUTE_BYTES))
    return {"weights_mb": weights / _MB, "of_fp16": weights / whole, "cache_bits": bits}


def _speed(row: dict[str, Any], fp16: dict[str, Any]) -> dict[str, Any]:
    kept = {key: row[key] for key in ("median", "min", "max", "n", "seconds", "policy")}
    return {**kept, "times_faster": fp16["median"] / row["median"]}


def flips(base: Sequence[LastWord], own: Sequence[LastWord]) -> dict[str, float]:
    """{accuracy, lost, won, changed}: lost and won are right answers, changed other wrong ones."""
    pairs = list(zip(base, own))
    return {
        "accuracy": sum(answer.is_right for answer in own) / len(own),
        "lost": sum(before.is_right and not after.is_right for before, after in pairs),
        "won": sum(after.is_right and not before.is_right for before, after in pairs),
        "changed": sum(before.drawn != after.drawn and before.is_right == after.is_right for before, after in pairs),
    }


def _quality(precision: str, found: dict[str, Divergence], answers: dict[str, list[LastWord]]) -> dict[str, Any]:
    own = flips(answers[FP16.name], answers[precision])
    if precision == FP16.name:
        return {"perplexity": next(iter(found.values())).baseline_perplexity, "accuracy": own["accuracy"]}
    divergence = found[precision]
    return {
        "perplexity": divergence.perplexity,
        "ratio": divergence.ratio,
        "interval": None if divergence.interval is None else list(divergence.interval),
        "same_top": divergence.same_top,
        "kl": divergence.kl.mean,
        "kl_p99": divergence.kl.p99,
        **own,
    }
