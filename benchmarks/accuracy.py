"""`bench accuracy`: LAMBADA and WikiText-2 by plain `helm-run` with our client, against lm-evaluation-harness.

The harness is no dependency of ours: it runs in a Python of its own. It has our weights (dequantized, rounded to 16
bits, computed in float32), our tokenizer and the same local data, but its own task definitions.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flexgen_helm.benchmarks import Options
from flexgen_helm.benchmarks.common import machine, run_logged
from flexgen_helm.benchmarks.helm_runs import HelmRun, helm_run
from flexgen_helm.benchmarks.reference import export_checked
from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.files import replace_text
from flexgen_helm.plugin.registration import prefix_token
from flexgen_helm.report.throughput import versions
from flexgen_helm.scenarios import lambada, wikitext

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
# Label, our run and statistic, the harness's task and metric (it reports no token perplexity).
FIGURES: tuple[tuple[str, str, str, str, str | None], ...] = (
    ("LAMBADA accuracy", "accuracy", "exact_match", "lambada_openai", "acc"),
    ("LAMBADA target perplexity", "perplexity", "target_perplexity", "lambada_openai", "perplexity"),
    ("WikiText-2 word perplexity", "wikitext", "word_perplexity", "wikitext", "word_perplexity"),
    ("WikiText-2 byte perplexity", "wikitext", "byte_perplexity", "wikitext", "byte_perplexity"),
    ("WikiText-2 bits per byte", "wikitext", "bits_per_byte", "wikitext", "bits_per_byte"),
    ("WikiText-2 token perplexity", "wikitext", "token_perplexity", "wikitext", None),
)
# Run by the harness's Python: prints its versions and the folder of its task definitions.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, os
versions = {name: m.version(name) for name in ('lm_eval', 'torch', 'transformers')}
print(json.dumps({'versions': versions, 'folder': os.path.dirname(u.find_spec('lm_eval').origin)}))
"""


@dataclass(frozen=True)
class Harness:
    """A Python with lm-evaluation-harness."""

    python: str
    folder: Path
    versions: Mapping[str, str]


@dataclass(frozen=True)
class TaskResult:
    """The harness's results of one task.

    metrics: over all documents.
    documents: log-likelihood of each document, and whether it is a hit (None for rolling log-likelihoods).
    """

    metrics: Mapping[str, float]
    documents: Sequence[tuple[float, bool | None]]


def run(options: Options) -> dict[str, Any]:
    """Score the same data with both sides; see `flexgen_helm.benchmarks` for the format.

    Its rows are scores instead of seconds: {label, ours, lm_eval, relative_difference, n}. `equal` says whether all
    differences are within `TOLERANCE`; `agreement` compares document by document.
    """
    refused = [name for name in ("engine", "entry", "repeats") if getattr(options, name)]
    if refused:
        raise UsageError(f"bench accuracy runs fixed entries with plain helm-run once: leave out {', '.join(refused)}")
    harness = find_harness(options.python)
    limits = (QUICK_PASSAGES, QUICK_PAGES) if options.quick else (options.instances, options.instances)
    passages, pages = lambada.read_passages()[: limits[0]], wikitext.read_pages()[: limits[1]]
    reference = Path(options.reference) if options.reference else None
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as name:
        scratch = Path(name)
        data = write_data(scratch / "data", passages, pages)
        checkpoint = open_checkpoint(WHEEL_MODEL)
        options.tell(f"writing the reference copy of {WHEEL_MODEL}")
        tokenizer = export_checked(checkpoint, scratch / "model")
        # What our deployments put before a document; the harness would take BOS, here a turn mark.
        (prefix,) = tokenizer.encode(prefix_token(tokenizer) or "", add_special_tokens=False)
        del checkpoint
        ours: dict[str, HelmRun] = {}
        documents: dict[str, list[dict[str, float]]] = {}
        for name, entry in ENTRIES.items():
            amount = len(pages) if name == "wikitext" else len(passages)
            ours[name] = helm_run([entry], amount, scratch / name, variables={"FLEXGEN_HELM_DATA": str(data)})
            documents[name] = by_document(scratch / name)
            options.tell(f"{entry}: {ours[name].seconds:.0f} s")
        theirs: dict[str, TaskResult] = {}
        for task, amount in (("lambada_openai", len(passages)), ("wikitext", len(pages))):
            folder = (reference or scratch / "reference") / task
            settings = {"model": WHEEL_MODEL, "max_length": MAX_LENGTH, "prefix_token_id": prefix, "documents": amount}
            claim_folder(folder, settings)
            command = harness_command(harness, task, data, scratch, folder, prefix)
            variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            variables["HF_DATASETS_CACHE"] = str(scratch / "cache")
            seconds = run_logged(command, folder / "log.txt", "lm_eval", env={**os.environ, **variables})
            options.tell(f"lm_eval {task}: {seconds:.0f} s")
            theirs[task] = read_harness(folder, task, amount)
    return _result(ours, documents, theirs, harness)


def find_harness(python: str | None) -> Harness:
    """Find the harness of `python` or `FLEXGEN_HELM_LM_EVAL_PYTHON`; raises `UsageError` that says how to get one."""
    python = python or os.environ.get(PYTHON_VARIABLE)
    how = (
        "make one with: python3 -m venv lmeval && lmeval/bin/pip install 'lm_eval[hf]==0.4.13', and name it: "
        f"--python lmeval/bin/python, or {PYTHON_VARIABLE}"
    )
    if not python:
        raise UsageError(f"bench accuracy needs a Python with lm-evaluation-harness; {how}")
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True)
    except OSError as error:
        raise UsageError(f"{python} cannot be run ({error.strerror}); {how}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"{python} has no lm-evaluation-harness ({reason}); {how}")
    probed = json.loads(done.stdout.strip().splitlines()[-1])
    return Harness(python, Path(probed["folder"]), probed["versions"])


def write_data(folder: Path, passages: Sequence[str], pages: Sequence[str]) -> Path:
    """Write the data of both sides: our files, and the pages one by one, as the harness reads them."""
    folder.mkdir(parents=True)
    for name, column, texts in ((lambada.FILE, "text", passages), ("pages.jsonl", "page", pages)):
        (folder / name).write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")
    (folder / wikitext.FILE).write_bytes("\n".join(pages).encode())
    return folder


def harness_command(harness: Harness, task: str, data: Path, scratch: Path, out: Path, prefix: int) -> list[str]:
    """Return the command `lm_eval run` for the harness's own task with nothing but the data's path changed."""
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
    tasks = scratch / "tasks"
    tasks.mkdir(exist_ok=True)
    (tasks / f"{task}_local.yaml").write_text(yaml.safe_dump(definition, sort_keys=False), encoding="utf-8")
    model = f"pretrained={scratch / 'model'},dtype=float32,max_length={MAX_LENGTH},prefix_token_id={prefix}"
    return [
        harness.python, "-m", "lm_eval", "run", "--model", "hf", "--model_args", model, "--device", "cpu",
        "--batch_size", "1", "--tasks", f"{task}_local", "--include_path", str(tasks), "--output_path", str(out),
        "--log_samples", "--use_cache", str(out / "answers"),
    ]  # fmt: skip


def claim_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Use `folder` for the results of these settings; raises `UsageError` if it has results of others.

    The harness caches its answers there too, so that an interrupted or repeated run continues.
    """
    file = folder / "settings.json"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(settings) + "\n")
    existing = json.loads(file.read_text(encoding="utf-8"))
    if existing != settings:
        raise UsageError(f"{folder} has results of {existing}, and this run is {dict(settings)}: name another folder")


def read_harness(folder: Path, task: str, documents: int) -> TaskResult:
    """Read the newest results below `folder`; raises `FlexgenError` if documents are missing."""
    result = json.loads(_newest(folder, "results_*.json").read_text(encoding="utf-8"))
    metrics = {name.removesuffix(",none"): value for name, value in result["results"][f"{task}_local"].items()}
    samples = _newest(folder, f"samples_{task}_local_*.jsonl").read_text(encoding="utf-8").splitlines()
    rows = sorted((json.loads(line) for line in samples), key=lambda row: row["doc_id"])
    if [row["doc_id"] for row in rows] != list(range(documents)):
        raise FlexgenError(f"{folder} has {len(rows)} documents of {documents}")
    return TaskResult(metrics, [_answer(row) for row in rows])


def _answer(row: Mapping[str, Any]) -> tuple[float, bool | None]:
    """Return the log-likelihood and whether greedy generation agrees; a rolling log-likelihood is a number alone."""
    response = row["filtered_resps"][0]
    if isinstance(response, list):
        return float(response[0]), str(response[1]) == "True"
    return float(response), None


def _newest(folder: Path, pattern: str) -> Path:
    paths = sorted(folder.rglob(pattern), key=lambda path: path.name)  # names end in the time
    if not paths:
        raise FlexgenError(f"lm_eval left no {pattern} in {folder}")
    return paths[-1]


def by_document(folder: Path) -> list[dict[str, float]]:
    """Read HELM's statistics of every instance below a run's `folder`, in the data's order."""
    (file,) = folder.glob("output/runs/*/*/per_instance_stats.json")
    rows = json.loads(file.read_text(encoding="utf-8"))
    stats = {
        int(row["instance_id"].removeprefix("id")): {stat["name"]["name"]: stat["sum"] for stat in row["stats"]}
        for row in rows
        if any(stat["name"]["name"] in ("exact_match", "logprob") for stat in row["stats"])
    }
    return [stats[index] for index in sorted(stats)]


def _result(
    ours: Mapping[str, HelmRun],
    documents: Mapping[str, Sequence[Mapping[str, float]]],
    theirs: Mapping[str, TaskResult],
    harness: Harness,
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for label, run_name, statistic, task, metric in FIGURES:
        value = ours[run_name].stats[f"{statistic} test"]
        row: dict[str, Any] = {"label": label, "ours": value}
        if metric is not None:
            reference = theirs[task].metrics[metric]
            row |= {"lm_eval": reference, "relative_difference": abs(value - reference) / max(abs(reference), 1e-300)}
        rows.append(row | {"n": len(theirs[task].documents)})
    agreement = agree(documents, theirs)
    largest = max(row["relative_difference"] for row in rows if "relative_difference" in row)
    (record,) = ours["wikitext"].records
    return {
        "name": "accuracy",
        "model": WHEEL_MODEL,
        "max_length": MAX_LENGTH,
        "hardware": {**machine(), **record["hardware"]},
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


def agree(
    documents: Mapping[str, Sequence[Mapping[str, float]]], theirs: Mapping[str, TaskResult]
) -> dict[str, float | int]:
    """Compare document by document; raises `FlexgenError` if the sides differ in their number."""
    passages, pages = theirs["lambada_openai"].documents, theirs["wikitext"].documents
    for name, scored in documents.items():
        expected = len(pages) if name == "wikitext" else len(passages)
        if len(scored) != expected:
            raise FlexgenError(f"helm-run scored {len(scored)} documents of {name}, lm_eval {expected}")
    verdicts = zip(documents["accuracy"], passages)
    targets = zip(documents["perplexity"], passages)
    page_scores = zip(documents["wikitext"], pages)
    return {
        "passages": len(passages),
        "passages_with_the_same_verdict": sum(bool(ours["exact_match"]) == hit for ours, (_, hit) in verdicts),
        "largest_difference_of_target_logprob": max(abs(ours["logprob"] - score) for ours, (score, _) in targets),
        "pages": len(pages),
        "largest_relative_difference_of_page_logprob": max(
            abs(ours["logprob"] / score - 1) for ours, (score, _) in page_scores
        ),
    }
