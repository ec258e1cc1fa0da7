"""LAMBADA and WikiText-2 with our client, against lm-evaluation-harness:
`python -m benchmarks.accuracy`.

The harness (`pip install 'flexgen-helm[lm-eval]'`) has our weights (dequantized, rounded to 16
bits, computed in float32), our tokenizer and the same local data, but its own task definitions and
transformers' model.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from flexgen_helm.benchmarks.common import report, script
from flexgen_helm.benchmarks.helm_runs import helm_run
from flexgen_helm.benchmarks.process import run_logged
from flexgen_helm.benchmarks.reference import export_checked
from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.cli.arguments import OutFile
from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.plugin.registration import prefix_token
from flexgen_helm.scenarios import lambada, wikitext

MAX_LENGTH = 2048
TOLERANCE = 1e-3  # relative; what 'equal' means for these figures
ENTRIES = {
    "accuracy": f"lambada:mode=accuracy,model=flexgen/{WHEEL_MODEL}",
    "perplexity": f"lambada:mode=perplexity,model=flexgen/{WHEEL_MODEL}",
    "wikitext": f"wikitext:max_length={MAX_LENGTH},model=flexgen/{WHEEL_MODEL}",
}
# The harness's task -> its definition inside the package.
TASKS = {
    "lambada_openai": "tasks/lambada/lambada_openai.yaml",
    "wikitext": "tasks/wikitext/wikitext.yaml",
}
# Label, our run and statistic, the harness's task and metric.
FIGURES = (
    ("LAMBADA accuracy", "accuracy", "exact_match", "lambada_openai", "acc"),
    (
        "LAMBADA target perplexity",
        "perplexity",
        "target_perplexity",
        "lambada_openai",
        "perplexity",
    ),
    ("WikiText-2 word perplexity", "wikitext", "word_perplexity", "wikitext", "word_perplexity"),
    ("WikiText-2 byte perplexity", "wikitext", "byte_perplexity", "wikitext", "byte_perplexity"),
    ("WikiText-2 bits per byte", "wikitext", "bits_per_byte", "wikitext", "bits_per_byte"),
)


def main(out: OutFile = None, instances: int | None = None) -> None:
    """Score the same data with both sides: more than an hour on two cores. instances: passages, and
    pages.
    """
    if find_spec("lm_eval") is None:
        raise UsageError(
            "lm-evaluation-harness is not installed: pip install 'flexgen-helm[lm-eval]'"
        )
    passages = lambada.read_passages()[:instances]
    pages = wikitext.read_pages()[:instances]
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as folder:
        scratch = Path(folder)
        data = write_data(scratch / "data", passages, pages)
        tokenizer = export_checked(open_checkpoint(WHEEL_MODEL), scratch / "model")
        # What our deployments put before a document; the harness would take BOS, here a turn mark.
        (prefix,) = tokenizer.encode(prefix_token(tokenizer) or "", add_special_tokens=False)
        ours: dict[str, dict[str, Any]] = {}
        for name, entry in ENTRIES.items():
            amount = len(pages) if name == "wikitext" else len(passages)
            run = helm_run(
                [entry], amount, scratch / name, variables={"FLEXGEN_HELM_DATA": str(data)}
            )
            ours[name] = {
                "stats": run.stats,
                "logprobs": by_document(scratch / name),
                "record": run.records[0],
            }
            print(f"{entry}: {run.seconds:.0f} s")
        theirs = {task: _run_harness(task, data, scratch, prefix) for task in TASKS}
    report(compared(ours, theirs), out)


def write_data(folder: Path, passages: Sequence[str], pages: Sequence[str]) -> Path:
    """Write the data of both sides: our files, and the pages one by one, as the harness reads
    them.
    """
    folder.mkdir(parents=True)
    for name, column, texts in ((lambada.FILE, "text", passages), ("pages.jsonl", "page", pages)):
        (folder / name).write_text(
            "".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8"
        )
    (folder / wikitext.FILE).write_bytes("\n".join(pages).encode())
    return folder


def _run_harness(task: str, data: Path, scratch: Path, prefix: int) -> dict[str, Any]:
    """Run the harness's task, with nothing but the data's path changed, by its own command."""
    import lm_eval

    file = "pages.jsonl" if task == "wikitext" else lambada.FILE
    definition = {
        "include": str(Path(str(lm_eval.__file__)).parent / TASKS[task]),
        "task": f"{task}_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(data / file)}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    out = scratch / f"lm_eval_{task}"
    out.mkdir()
    (out / f"{task}_local.yaml").write_text(
        yaml.safe_dump(definition, sort_keys=False), encoding="utf-8"
    )
    model = (
        f"pretrained={scratch / 'model'},dtype=float32,max_length={MAX_LENGTH},"
        f"prefix_token_id={prefix}"
    )
    flags = ["lm_eval", "run", "--model", "hf", "--device=cpu", "--batch_size=1", "--log_samples"]
    command = [sys.executable, "-m", *flags, "--model_args", model, "--tasks", f"{task}_local"]
    command += [f"--include_path={out}", f"--output_path={out}"]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(scratch / "cache"),
    }
    seconds = run_logged(command, out / "log.txt", "lm_eval", env={**os.environ, **variables})
    print(f"lm_eval {task}: {seconds:.0f} s")
    return read_harness(out, task)


def read_harness(folder: Path, task: str) -> dict[str, Any]:
    """Return {metrics, logprobs of all documents in the data's order} from the files that lm_eval
    left.
    """
    (results,), (samples,) = (
        folder.rglob("results_*.json"),
        folder.rglob(f"samples_{task}_local_*.jsonl"),
    )
    metrics = json.loads(results.read_text(encoding="utf-8"))["results"][f"{task}_local"]
    rows = map(json.loads, samples.read_text(encoding="utf-8").splitlines())
    answers = [row["filtered_resps"][0] for row in sorted(rows, key=lambda row: row["doc_id"])]
    # [log-probability, whether greedy generation agrees]; a rolling log-likelihood is a number
    # alone.
    logprobs = [float(answer[0] if isinstance(answer, list) else answer) for answer in answers]
    return {
        "metrics": {name.removesuffix(",none"): value for name, value in metrics.items()},
        "logprobs": logprobs,
    }


def by_document(folder: Path) -> list[float]:
    """Return the log-probability of every instance of HELM's run below a `folder`, in the data's
    order.
    """
    (file,) = folder.glob("output/runs/*/*/per_instance_stats.json")
    found = {
        int(row["instance_id"].removeprefix("id")): stat["sum"]
        for row in json.loads(file.read_text(encoding="utf-8"))
        for stat in row["stats"]
        if stat["name"]["name"] == "logprob"
    }
    return [found[index] for index in sorted(found)]


def compared(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the result: rows are scores, `equal` says whether all differences are within
    `TOLERANCE`.

    `agreement` has the largest differences of documents. Raises `FlexgenError` if the sides differ
    in their number.
    """
    rows = []
    for label, run, statistic, task, metric in FIGURES:
        value, reference = ours[run]["stats"][f"{statistic} test"], theirs[task]["metrics"][metric]
        difference = abs(value - reference) / max(abs(reference), 1e-300)
        figures = {"ours": value, "lm_eval": reference, "relative_difference": difference}
        rows.append({"label": label, **figures, "n": len(theirs[task]["logprobs"])})
    largest = max(row["relative_difference"] for row in rows)
    differences = {}
    for name, task in (("perplexity", "lambada_openai"), ("wikitext", "wikitext")):
        scored, expected = ours[name]["logprobs"], theirs[task]["logprobs"]
        if len(scored) != len(expected):
            raise FlexgenError(
                f"helm-run scored {len(scored)} documents of {name}, lm_eval {len(expected)}"
            )
        differences[task] = max(abs(a - b) for a, b in zip(scored, expected))
    return {
        "name": "accuracy",
        "model": WHEEL_MODEL,
        "max_length": MAX_LENGTH,
        "hardware": ours["wikitext"]["record"]["hardware"],
        "rows": rows,
        "ratios": {},
        "equal": largest <= TOLERANCE,
        "agreement": differences,
        "notes": [
            f"largest relative difference {largest:.1e}; equal means within {TOLERANCE:g}",
            *(
                f"{task}: log-probabilities of documents differ by {most:.1e}"
                for task, most in differences.items()
            ),
        ],
    }


if __name__ == "__main__":
    script(main)
