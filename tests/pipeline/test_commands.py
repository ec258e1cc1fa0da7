"""Commands under torchrun: `batch` survives the loss of a rank, and `run` gives HELM's scores of one process."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.forks import python
from tests.helpers.parity import prompts
from tests.helpers.pipeline_ranks import torchrun, torchrun_in_forks

BATCH = ("batch", "in.jsonl", "--model", "mine")
ENTRIES = ("simple_mcqa_scored:model=flexgen/mine", "simple_mcqa:model=flexgen/mine")


@pytest.fixture
def environment(tmp_path, tiny):
    (tmp_path / "models.yaml").write_text(f"mine: {tiny('llama').path}\n")
    return {
        **os.environ, "FLEXGEN_HELM_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1",
        "FLEXGEN_HELM_MODELS": str(tmp_path / "models.yaml"),
    }  # fmt: skip


def write_lines(path, rows, tokens):
    bodies = [{"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} for ids in rows]
    lines = [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
    path.write_text("\n".join(map(json.dumps, lines)))


def command(num_ranks, *arguments):
    if num_ranks == 1:
        return [sys.executable, "-m", "flexgen_helm", *arguments]
    return torchrun(num_ranks, "-m", "flexgen_helm", *arguments)


def rank_process(agent, rank):
    ranks = {child.environ().get("RANK"): child for child in psutil.Process(agent.pid).children()}
    return ranks[str(rank)]


@pytest.mark.slow
def test_batch_goes_on_after_the_loss_of_a_rank(tmp_path, environment):
    write_lines(tmp_path / "in.jsonl", prompts(60, 40), 20)
    # So few positions of cache that answers come one after the other.
    slow = [*BATCH, "--cpu-memory", "4MB", "--policy", "2x1,0,100,0,100,0,100"]
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    run = {"cwd": tmp_path, "env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command(2, *slow, "-o", str(out)), **run) as ranks:
        while not (partial.is_file() and partial.read_text().count("\n") >= 5):
            assert ranks.poll() is None, ranks.stdout.read()
            time.sleep(0.01)
        rank_process(ranks, 1).send_signal(signal.SIGKILL)
        began = time.monotonic()
        said, _ = ranks.communicate(timeout=60)
    assert ranks.returncode and time.monotonic() - began < 10
    assert said.count("rank 1 of the pipeline was lost") == 1, said
    finished = partial.read_text().splitlines()
    assert 5 <= len(finished) < 60 and not out.exists()

    again = subprocess.run(command(2, *slow, "-o", str(out)), **run)
    assert again.returncode == 0 and "goes on behind" in again.stdout, again.stdout
    whole = subprocess.run(command(1, *slow, "-o", str(tmp_path / "one.jsonl")), **run)
    assert whole.returncode == 0, whole.stdout
    texts = [
        [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in path.read_text().splitlines()]
        for path in (out, tmp_path / "one.jsonl")
    ]
    assert len(texts[0]) == 60 and texts[0] == texts[1]


@pytest.mark.slow
def test_ranks_end_with_a_killed_torchrun(tmp_path, environment):
    """torchrun cannot end its processes if the kernel kills it; without a signal of their own they would go on."""
    write_lines(tmp_path / "in.jsonl", prompts(400, 30), 60)
    slow = [*BATCH, "--cpu-memory", "4MB", "--policy", "2x1,0,100,0,100,0,100"]
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    with (tmp_path / "said").open("w") as said, subprocess.Popen(
        command(2, *slow, "-o", str(out)), cwd=tmp_path, env=environment, stdout=said, stderr=said
    ) as agent:  # fmt: skip
        while not (partial.is_file() and partial.read_text()):  # it has answers in the order of the lines
            assert agent.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.01)
        ranks = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        _, alive = psutil.wait_procs(ranks, timeout=10)
    for rank in alive:
        rank.kill()
    assert len(ranks) >= 2 and not alive
    assert 0 < len(partial.read_text().splitlines()) < 400 and not out.exists()


@pytest.mark.slow
def test_run_gives_the_scores_of_one_process(tmp_path, environment):
    scores = {}
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        arguments = ["run", "-r", *ENTRIES, "-m", "4", "--suite", "s"]
        variables = {**environment, "FLEXGEN_HELM_HOME": str(folder / "home")}  # one has not the answers of the other
        program = ("-m", "flexgen_helm", *arguments)
        command = [*python("all"), *program] if num_ranks == 1 else torchrun_in_forks(num_ranks, *program)
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        stats = sorted((folder / "benchmark_output/runs/s").glob("*/stats.json"))
        names = ("exact_match", "logprob", "perplexity")
        scores[num_ranks] = [
            [(s["name"], round(s["mean"], 4)) for s in json.loads(path.read_text()) if s["name"]["name"] in names]
            for path in stats
        ]
        record = json.loads((stats[0].parent / "flexgen_run.json").read_text())
        assert ("pipeline" in record) == (num_ranks == 2)
    assert len(scores[1]) == 2 and all(scores[1]) and scores[1] == scores[2]
