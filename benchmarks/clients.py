"""`bench clients`: plain `helm-run`, end to end, with our client and with HELM's own Hugging Face client.

HELM's client gets its best: float32 (its default, float16, is far slower on CPUs), the better of one and four
threads, no chat template, and the very weights and tokenizer that we use, already dequantized. Each measurement is
a fresh process with nothing to reuse.
"""

from __future__ import annotations

import math
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from flexgen_helm.benchmarks import Options, summary
from flexgen_helm.benchmarks.helm_runs import HelmRun, helm_run
from flexgen_helm.benchmarks.reference import export, same_tokens
from flexgen_helm.checkpoint.entries import WHEEL_MODEL
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.core.errors import FlexgenError, UsageError
from flexgen_helm.report.throughput import versions
from flexgen_helm.text.tokenizer import Tokenizer

ENTRY = "synthetic_reasoning_natural:difficulty=easy"
INSTANCES, REPEATS = 50, 3
BUSY_LOAD = 0.5  # runnable processes before we begin
QUICK_INSTANCES, QUICK_REPEATS = 5, 1
OURS, REFERENCE = f"flexgen/{WHEEL_MODEL}", "reference/huggingface"
# Log-probability metrics equal within this, relatively; others exactly (INTERFACES, 'Equal scores').
TOLERANCE = 1e-4
# Metrics of log-probabilities, and what each says where every token has probability 1.
_OF_CERTAINTY = {"logprob": 0.0, "bits_per_byte": 0.0, "perplexity": 1.0, "max_prob": 1.0}
# Spaces, digits, scripts: where two copies of a tokenizer would part.
_SAMPLE = ["Rules: If Bob is big, then Bob is 1234 kind.\nFact:\tIt's  cold.", "naïve café, 東京 🙂", "", " "]


def run(options: Options) -> dict[str, Any]:
    """Measure both sides in alternation; see `flexgen_helm.benchmarks` for the format.

    Beside it: `scores` (what differs between the sides), `bound` (seconds that our operations take at the measured
    rate) and the fractions of it that were reached.
    """
    if options.engine:
        raise UsageError(
            f"bench clients runs plain helm-run, which has no engine flags: leave out {list(options.engine)}"
        )
    entry = options.entry or ENTRY
    instances = options.instances or (QUICK_INSTANCES if options.quick else INSTANCES)
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    sides: dict[str, tuple[str, int | None]] = {
        "flexgen": (OURS, None),
        "huggingface -n 1": (REFERENCE, 1),
        "huggingface -n 4": (REFERENCE, 4),
    }
    runs: dict[str, list[HelmRun]] = {label: [] for label in sides}
    busy = psutil.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        options.tell(f"writing the reference copy of {WHEEL_MODEL}")
        configs = _prepare(Path(scratch), options)
        for repeat in range(repeats):
            for label, (model, threads) in sides.items():
                folder = Path(scratch) / f"{label.replace(' ', '')}.{repeat}"
                found = helm_run(with_model(entry, model), instances, folder, configs, threads)
                runs[label].append(found)
                options.tell(f"{label}: {found.seconds:.1f} s ({repeat + 1} of {repeats})")
    result = _result(runs, entry, instances)
    if busy > BUSY_LOAD:
        result["notes"].append(f"other programs were computing when this began (load {busy:.1f}): figures are noise")
    return result


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


def _prepare(scratch: Path, options: Options) -> Path:
    """Write the reference copy and the entries that name it; returns the entries' folder."""
    checkpoint = open_checkpoint(WHEEL_MODEL, progress=options.tell)
    folder, configs = scratch / "reference", scratch / "configs"
    export(checkpoint, folder)
    assert checkpoint.tokenizer_path is not None
    tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path)
    assert tokenizer is not None
    if not same_tokens(folder, tokenizer, _SAMPLE):
        raise FlexgenError("the reference copy's tokenizer differs from ours, so the sides would not do the same work")
    content = helm_configs(folder, checkpoint.spec.max_positions)
    ends = {"end_of_text_token": tokenizer.eos_text, "prefix_token": tokenizer.bos_text or tokenizer.eos_text}
    content["tokenizer_configs.yaml"]["tokenizer_configs"][0].update(ends)
    configs.mkdir()
    for name, entries in content.items():
        (configs / name).write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
    return configs


def _result(runs: Mapping[str, list[HelmRun]], entry: str, instances: int) -> dict[str, Any]:
    rows = [_row(label, found) for label, found in runs.items()]
    ours, *theirs = rows
    best = min(theirs, key=lambda row: float(row["median"]))
    typical, reference = _typical(runs["flexgen"]), runs[best["label"]][-1]
    record = typical.record
    assert record is not None, "our runs leave flexgen_run.json"
    bound = bound_of(record, typical.seconds)
    differing = differences(typical.stats, reference.stats)
    unexplained = [line for line in differing if line["why"] is None]
    equal = sum(a == b for a, b in zip(typical.texts, reference.texts))
    notes = [
        f"bound: {bound['flops']:.3g} operations at {bound['flops_per_s']:.3g}/s take {bound['seconds']:.1f} s; "
        f"the engine reached {bound['fraction_of_engine']:.0%} of it and the whole process "
        f"{bound['fraction_end_to_end']:.0%}",
        f"completions: {equal} of {len(typical.texts)} equal; metrics: {len(typical.stats) - len(differing)} equal, "
        f"{len(differing) - len(unexplained)} differ as HELM's client must, {len(unexplained)} differ otherwise",
        *dict.fromkeys(f"  {line['why']}" for line in differing if line["why"]),
        *(f"  {line['metric']}: {line['ours']:g}, reference {line['reference']:g}" for line in unexplained),
    ]
    hardware = {
        "machine": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        **record["hardware"],
    }
    return {
        "name": "clients",
        "entry": entry,
        "instances": instances,
        "hardware": hardware,
        "versions": versions(),
        "rows": rows,
        "ratios": {
            "end_to_end_against_best": best["median"] / ours["median"],
            **{f"end_to_end_against_{row['label'].replace(' -', '_').replace(' ', '')}": row["median"] / ours["median"]
               for row in theirs},
        },
        "bound": bound,
        "scores": {"compared": len(typical.stats), "differing": differing, "equal_completions": equal},
        "notes": notes,
    }  # fmt: skip


def _typical(found: list[HelmRun]) -> HelmRun:
    """The run in the middle (of an even number, the faster of the two)."""
    return sorted(found, key=lambda run: run.seconds)[(len(found) - 1) // 2]


def _row(label: str, found: list[HelmRun]) -> dict[str, Any]:
    """request_s: of concurrent threads the times overlap, so their sum may exceed the wall time."""
    seconds = [run.seconds for run in found]
    return {
        "label": label,
        **summary(seconds),
        "request_s": summary([run.request_s for run in found])["median"],
        "seconds": seconds,
    }


def bound_of(record: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """What the run's operations take at the measured product rate, and how near to it engine and process came."""
    rate = record["hardware"]["matmul_flops"]
    least = record["flops"] / rate
    return {
        "flops": record["flops"],
        "flops_per_s": rate,
        "seconds": least,
        "fraction_of_engine": least / record["latency_s"],
        "fraction_end_to_end": least / seconds,
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
