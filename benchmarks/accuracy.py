"""`bench accuracy`: LAMBADA and WikiText-2 by plain `helm-run` with us, beside lm-evaluation-harness.

The harness is no dependency of ours: it runs in a Python of its own, on the very weights (dequantized, rounded to 16
bits, computed in float32) and tokenizer that we use, with its own task definitions pointed at the same local data.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from flexgen_helm.benchmarks import Options
from flexgen_helm.benchmarks.clients import _SAMPLE
from flexgen_helm.benchmarks.helm_runs import HelmRun, helm_run
from flexgen_helm.benchmarks.reference import export, same_tokens
from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import replace_text
from flexgen_helm.report.throughput import versions
from flexgen_helm.tokenizer.tokenizer import Tokenizer

MAX_LENGTH = 2048
TOLERANCE = 1e-3  # relative; what 'equal' means for these figures
PYTHON_VARIABLE = "FLEXGEN_HELM_LM_EVAL_PYTHON"
QUICK_PASSAGES, QUICK_PAGES = 5, 1
ENTRIES = {
    "accuracy": f"lambada:mode=accuracy,model=flexgen/{WHEEL_MODEL}",
    "perplexity": f"lambada:mode=perplexity,model=flexgen/{WHEEL_MODEL}",
    "wikitext": f"wikitext:max_length={MAX_LENGTH},model=flexgen/{WHEEL_MODEL}",
}
# The harness's task -> its definition inside the package.
TASKS = {"lambada_openai": "tasks/lambada/lambada_openai.yaml", "wikitext": "tasks/wikitext/wikitext.yaml"}
# Label, our run and statistic, the harness's task and metric (it reports none by token).
FIGURES: tuple[tuple[str, str, str, str, str | None], ...] = (
    ("LAMBADA accuracy", "accuracy", "exact_match", "lambada_openai", "acc"),
    ("LAMBADA target perplexity", "perplexity", "target_perplexity", "lambada_openai", "perplexity"),
    ("WikiText-2 word perplexity", "wikitext", "word_perplexity", "wikitext", "word_perplexity"),
    ("WikiText-2 byte perplexity", "wikitext", "byte_perplexity", "wikitext", "byte_perplexity"),
    ("WikiText-2 bits per byte", "wikitext", "bits_per_byte", "wikitext", "bits_per_byte"),
    ("WikiText-2 token perplexity", "wikitext", "token_perplexity", "wikitext", None),
)
# Asked of the harness's Python: what it has, and where its task definitions lie.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, os
found = {name: m.version(name) for name in ('lm_eval', 'torch', 'transformers')}
print(json.dumps({'versions': found, 'folder': os.path.dirname(u.find_spec('lm_eval').origin)}))
"""


@dataclass(frozen=True)
class Harness:
    """A Python with lm-evaluation-harness."""

    python: str
    folder: Path
    versions: Mapping[str, str]


@dataclass(frozen=True)
class TaskResult:
    """metrics: over all documents. documents: log-likelihood and, where there is one, hit or miss, by document."""

    metrics: Mapping[str, float]
    documents: Sequence[tuple[float, bool | None]]


def run(options: Options) -> dict[str, Any]:
    """Both sides over the same data; see `flexgen_helm.benchmarks` for the format.

    Its rows are figures, not seconds: {label, ours, lm_eval, relative_difference, n}. `equal` says whether all
    differences are within `TOLERANCE`; `agreement` compares document by document.
    """
    refused = [name for name in ("engine", "entry", "repeats") if getattr(options, name)]
    if refused:
        raise UsageError(f"bench accuracy runs fixed entries with plain helm-run once: leave out {', '.join(refused)}")
    harness = find_harness(options.python)
    passages, pages = _data(options)
    kept = Path(options.reference) if options.reference else None
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        place = Path(scratch)
        data = write_data(place / "data", passages, pages)
        checkpoint = open_checkpoint(WHEEL_MODEL, progress=options.tell)
        assert checkpoint.tokenizer_path is not None
        tokenizer = Tokenizer.from_path(checkpoint.tokenizer_path)
        assert tokenizer is not None
        prefix = _prefix_id(tokenizer)
        options.tell(f"writing the reference copy of {WHEEL_MODEL}")
        export(checkpoint, place / "model")
        if not same_tokens(place / "model", tokenizer, _SAMPLE):
            raise FlexgenError("the reference copy's tokenizer differs from ours: the sides would score other tokens")
        del checkpoint
        ours: dict[str, HelmRun] = {}
        documents: dict[str, list[dict[str, float]]] = {}
        for name, entry in ENTRIES.items():
            amount = len(pages) if name == "wikitext" else len(passages)
            ours[name] = helm_run([entry], amount, place / name, variables={"FLEXGEN_HELM_DATA": str(data)})
            documents[name] = by_document(place / name)
            options.tell(f"{entry}: {ours[name].seconds:.0f} s")
        theirs: dict[str, TaskResult] = {}
        for task, amount in (("lambada_openai", len(passages)), ("wikitext", len(pages))):
            folder = (kept or place / "reference") / task
            settings = {"model": WHEEL_MODEL, "max_length": MAX_LENGTH, "prefix_token_id": prefix, "documents": amount}
            keep(folder, settings)
            began = time.monotonic()
            _run_harness(harness_command(harness, task, data, place, folder, prefix), place, folder)
            options.tell(f"lm_eval {task}: {time.monotonic() - began:.0f} s")
            theirs[task] = read_harness(folder, task, amount)
    return _result(ours, documents, theirs, harness)


def find_harness(python: str | None) -> Harness:
    """The harness behind `python` or `FLEXGEN_HELM_LM_EVAL_PYTHON`; raises `UsageError` that says how to get one."""
    named = python or os.environ.get(PYTHON_VARIABLE)
    how = (
        "make one with: python3 -m venv lmeval && lmeval/bin/pip install 'lm_eval[hf]==0.4.13', and name it: "
        f"--python lmeval/bin/python, or {PYTHON_VARIABLE}"
    )
    if not named:
        raise UsageError(f"bench accuracy needs a Python with lm-evaluation-harness; {how}")
    try:
        done = subprocess.run([named, "-c", _PROBE], capture_output=True, text=True)
    except OSError as error:
        raise UsageError(f"{named} cannot be run ({error.strerror}); {how}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"{named} has no lm-evaluation-harness ({reason}); {how}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return Harness(named, Path(found["folder"]), found["versions"])


def _data(options: Options) -> tuple[list[str], list[str]]:
    from flexgen_helm.scenarios import lambada, wikitext

    limits = (QUICK_PASSAGES, QUICK_PAGES) if options.quick else (options.instances, options.instances)
    return lambada.read_passages()[: limits[0]], wikitext.read_pages()[: limits[1]]


def write_data(folder: Path, passages: Sequence[str], pages: Sequence[str]) -> Path:
    """What both sides read: our files, and the pages one by one, because the harness's come ready split."""
    from flexgen_helm.scenarios import lambada, wikitext

    folder.mkdir(parents=True)

    def lines(column: str, texts: Sequence[str]) -> str:
        return "".join(json.dumps({column: text}) + "\n" for text in texts)

    (folder / lambada.FILE).write_bytes(lines("text", passages).encode())
    (folder / wikitext.FILE).write_bytes("\n".join(pages).encode())
    (folder / "pages.jsonl").write_bytes(lines("page", pages).encode())
    return folder


def _prefix_id(tokenizer: Tokenizer) -> int:
    """The token that our deployments put before a document; the harness would take BOS, here a chat's turn mark."""
    from flexgen_helm.plugin.registration import prefix_token

    (found,) = tokenizer.encode(prefix_token(tokenizer) or "", add_special_tokens=False)
    return found


def harness_command(harness: Harness, task: str, data: Path, scratch: Path, out: Path, prefix: int) -> list[str]:
    """`lm_eval run` of the harness's own task, of which only the data's place is changed."""
    from flexgen_helm.scenarios import lambada

    tasks = scratch / "tasks"
    tasks.mkdir(exist_ok=True)
    file = data / (lambada.FILE if task == "lambada_openai" else "pages.jsonl")
    definition = {
        "include": str(harness.folder / TASKS[task]),
        "task": f"{task}_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    (tasks / f"{task}_local.yaml").write_text(yaml.safe_dump(definition, sort_keys=False), encoding="utf-8")
    arguments = {
        "pretrained": scratch / "model",
        "dtype": "float32",
        "max_length": MAX_LENGTH,
        "prefix_token_id": prefix,
    }
    model = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [harness.python, "-m", "lm_eval", "run", "--model", "hf", "--model_args", model]
    command += ["--tasks", f"{task}_local", "--include_path", str(tasks), "--device", "cpu", "--batch_size", "1"]
    return [*command, "--output_path", str(out), "--log_samples", "--use_cache", str(out / "answers")]


def _run_harness(command: Sequence[str], scratch: Path, out: Path) -> None:
    log = out / "log.txt"
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_CACHE": str(scratch / "cache")}
    with log.open("wb") as sink:
        done = subprocess.run(command, env={**os.environ, **variables}, stdout=sink, stderr=subprocess.STDOUT)
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
        raise FlexgenError(f"lm_eval ended with {done.returncode}:\n{tail}")


def keep(folder: Path, settings: Mapping[str, Any]) -> None:
    """Make `folder` the place of this run's results; raises `UsageError` where it is that of another run.

    The harness keeps its answers there too, so that a run that was interrupted, or that is asked for again, goes on.
    """
    file = folder / "settings.json"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(settings) + "\n")
    found = json.loads(file.read_text(encoding="utf-8"))
    if found != settings:
        raise UsageError(f"{folder} holds results of {found}, and {dict(settings)} is asked for: name another folder")


def read_harness(folder: Path, task: str, documents: int) -> TaskResult:
    """The newest results below `folder`; raises `FlexgenError` where documents are missing."""
    result = json.loads(_newest(folder, "results_*.json").read_text(encoding="utf-8"))
    metrics = {name.removesuffix(",none"): value for name, value in result["results"][f"{task}_local"].items()}
    samples = _newest(folder, f"samples_{task}_local_*.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted((json.loads(line) for line in samples), key=lambda row: row["doc_id"])
    if [row["doc_id"] for row in rows] != list(range(documents)):
        raise FlexgenError(f"{folder} has {len(rows)} documents of {documents}")
    return TaskResult(metrics, [_answer(row) for row in rows])


def _answer(row: Mapping[str, Any]) -> tuple[float, bool | None]:
    """(log-likelihood, greedy); the harness writes both as text, and a rolling one as a number alone."""
    found = row["filtered_resps"][0]
    if isinstance(found, list):
        return float(found[0]), str(found[1]) == "True"
    return float(found), None


def _newest(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern), key=lambda path: path.name)  # names end in the time
    if not found:
        raise FlexgenError(f"lm_eval left no {pattern} in {folder}")
    return found[-1]


def by_document(folder: Path) -> list[dict[str, float]]:
    """HELM's statistics of every instance below a run's `folder`, in the data's order."""
    (file,) = folder.glob("output/runs/*/*/per_instance_stats.json")
    rows = json.loads(file.read_text(encoding="utf-8"))
    found = {
        int(row["instance_id"].removeprefix("id")): {stat["name"]["name"]: stat["sum"] for stat in row["stats"]}
        for row in rows
        if any(stat["name"]["name"] in ("exact_match", "logprob") for stat in row["stats"])
    }
    return [found[index] for index in sorted(found)]


def _result(
    ours: Mapping[str, HelmRun],
    documents: Mapping[str, Sequence[Mapping[str, float]]],
    theirs: Mapping[str, TaskResult],
    harness: Harness,
) -> dict[str, Any]:
    rows = [_row(*figure, ours, theirs) for figure in FIGURES]
    agreement = agree(documents, theirs)
    largest = max(row["relative_difference"] for row in rows if "relative_difference" in row)
    (record,) = ours["wikitext"].records
    hardware = {"machine": platform.machine(), "cores": psutil.cpu_count(logical=False), **record["hardware"]}
    return {
        "name": "accuracy",
        "model": WHEEL_MODEL,
        "max_length": MAX_LENGTH,
        "hardware": hardware,
        "versions": versions() | {f"reference {name}": version for name, version in harness.versions.items()},
        "rows": rows,
        "ratios": {},
        "equal": largest <= TOLERANCE,
        "agreement": agreement,
        "notes": [
            f"largest relative difference {largest:.1e}; equal means within {TOLERANCE:g}",
            f"LAMBADA: {agreement['passages_with_the_same_verdict']} of {agreement['passages']} passages are judged "
            "alike; a target's log-probability differs by at most "
            f"{agreement['largest_difference_of_target_logprob']:.1e}, a page's by at most "
            f"{agreement['largest_relative_difference_of_page_logprob']:.1e} of itself",
        ],
    }


def _row(
    label: str,
    run_name: str,
    statistic: str,
    task: str,
    metric: str | None,
    ours: Mapping[str, HelmRun],
    theirs: Mapping[str, TaskResult],
) -> dict[str, Any]:
    value = ours[run_name].stats[f"{statistic} test"]
    row: dict[str, Any] = {"label": label, "ours": value}
    if metric is not None:
        reference = theirs[task].metrics[metric]
        row |= {"lm_eval": reference, "relative_difference": abs(value - reference) / max(abs(reference), 1e-300)}
    return row | {"n": len(theirs[task].documents)}


def agree(
    documents: Mapping[str, Sequence[Mapping[str, float]]], theirs: Mapping[str, TaskResult]
) -> dict[str, float | int]:
    """Document by document; raises `FlexgenError` where the sides have not the same number of them."""
    passages, pages = theirs["lambada_openai"].documents, theirs["wikitext"].documents
    for name, found in documents.items():
        wanted = len(pages) if name == "wikitext" else len(passages)
        if len(found) != wanted:
            raise FlexgenError(f"helm-run scored {len(found)} documents of {name}, lm_eval {wanted}")
    verdicts = zip(documents["accuracy"], passages)
    targets = zip(documents["perplexity"], passages)
    return {
        "passages": len(passages),
        "passages_with_the_same_verdict": sum(bool(own["exact_match"]) == hit for own, (_, hit) in verdicts),
        "largest_difference_of_target_logprob": max(abs(own["logprob"] - score) for own, (score, _) in targets),
        "pages": len(pages),
        "largest_relative_difference_of_page_logprob": max(
            math.fabs(own["logprob"] / score - 1) for own, (score, _) in zip(documents["wikitext"], pages)
        ),
    }
