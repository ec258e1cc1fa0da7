"""Every program in examples/ runs as a reader would run it, with a tiny model instead of a
downloaded one.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.forks import python
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

EXAMPLES = ROOT / "examples"
TESTED = ("first_score", "own_checkpoint", "larger_than_memory", "fp16_against_4bit")
POSITIONS = 2000  # HELM's prompts have hundreds of tokens in the tiny tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_random(folder, llama_config(max_position_embeddings=POSITIONS), seed=1)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def run_example(tmp_path):
    """Run an example in an empty folder with its own state; return what it printed."""

    def run(name, *arguments, **variables):
        # The commands of this environment, helm-run among them.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {
            "FLEXGEN_HELM_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "PATH": path,
            **variables,
        }
        command = [*python("all"), str(EXAMPLES / f"{name}.py"), *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **own}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_every_example_is_tested():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(TESTED)


@pytest.mark.slow
def test_first_score(run_example, checkpoint, tmp_path):
    models = tmp_path / "models.yaml"
    models.write_text(json.dumps({"tiny": str(checkpoint)}))
    printed = run_example("first_score", "tiny", FLEXGEN_HELM_MODELS=str(models))
    assert re.search(r"^accuracy [01]\.\d{3} at \d+ tokens/s$", printed, re.MULTILINE)


@pytest.mark.slow
def test_own_checkpoint(run_example, checkpoint, tmp_path):
    printed = run_example("own_checkpoint", str(checkpoint))
    folder = tmp_path / "benchmark_output" / "runs" / "own-checkpoint"
    assert printed.endswith(f"results are in {folder}\n")
    record = json.loads(
        (folder / "simple_mcqa:model=flexgen_mine" / "flexgen_run.json").read_text()
    )
    assert (record["precision"], record["workload"]["num_requests"]) == ("fp16", 10)
    documented = re.findall(r"`(\w+)`", (ROOT / "docs" / "reference" / "files.md").read_text())
    assert set(record) <= set(documented), "describe these keys in docs/reference/files.md"


def test_larger_than_memory(run_example, tmp_path):
    large = tmp_path / "large"
    config = llama_config(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8
    )
    save_random(large, config, seed=2)  # 25 MB
    save_tokenizer(large)
    printed = run_example("larger_than_memory", str(large), "12000000", str(tmp_path / "offload"))
    on_disk = re.search(r"(\d+)% of the weights on the disk, ([\d.]+) MB read", printed)
    assert on_disk is not None and int(on_disk[1]) > 20 and float(on_disk[2]) > 10, printed
    used = re.search(r"host memory used: ([\d.]+) of 12.0 MB", printed)
    assert used is not None and float(used[1]) <= 12.0, printed


def test_fp16_against_4bit(run_example, checkpoint, tmp_path):
    (tmp_path / "text").write_text(
        (ROOT / "SECURITY.md").read_text(encoding="utf-8")[:1500], encoding="utf-8"
    )
    printed = run_example("fp16_against_4bit", str(checkpoint), str(tmp_path / "text"))
    found = re.findall(
        r"^(fp16|4bit) +perplexity +([\d.]+) +peak memory +[\d.]+ MB$", printed, re.MULTILINE
    )
    assert [precision for precision, _ in found] == ["fp16", "4bit"], printed
    fp16, packed = (float(perplexity) for _, perplexity in found)
    assert fp16 != packed and packed == pytest.approx(fp16, rel=0.5)
