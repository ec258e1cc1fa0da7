"""Commands under torchrun: `batch` survives the loss of a rank, and `run` gives HELM's scores of
one process.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.forks import python
from tests.helpers.parity import prompts
from tests.helpers.pipeline_ranks import torchrun, torchrun_in_forks

# So few positions of cache that answers come one after the other.
BATCH = (
    "batch", "in.jsonl", "--model", "mine", "--cpu-memory", "4MB", "--policy",
    "2x1,0,100,0,100,0,100", "-o",
)  # fmt: skip
ENTRIES = ("simple_mcqa_scored:model=flexgen/mine", "simple_mcqa:model=flexgen/mine")


@pytest.fixture
def environment(tmp_path, tiny):
    (tmp_path / "models.yaml").write_text(f"mine: {tiny('llama').path}\n")
    return {
        **os.environ, "FLEXGEN_HELM_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1",
        "FLEXGEN_HELM_MODELS": str(tmp_path / "models.yaml"),
    }  # fmt: skip


@contextmanager
def begun(folder, environment, lines, tokens, answers):
    """A batch of two ranks that has given so many answers; its output goes to `said`."""
    bodies = [
        {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True} for ids in lines
    ]
    asked = [
        {"custom_id": str(i), "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, asked)))
    partial, said = folder / "out.jsonl.partial", folder / "said"
    with (
        said.open("w") as out,
        subprocess.Popen(
            command(2, *BATCH, "out.jsonl"), cwd=folder, env=environment, stdout=out, stderr=out
        ) as ranks,
    ):
        while not (partial.is_file() and partial.read_text().count("\n") >= answers):
            assert ranks.poll() is None, said.read_text()
            time.sleep(0.01)
        yield ranks
    assert (
        answers <= partial.read_text().count("\n") < len(lines)
        and not (folder / "out.jsonl").exists()
    )


def command(num_ranks, *arguments):
    if num_ranks == 1:
        return [sys.executable, "-m", "flexgen_helm", *arguments]
    return torchrun(num_ranks, "-m", "flexgen_helm", *arguments)


@pytest.mark.slow
def test_batch_goes_on_after_the_loss_of_a_rank(tmp_path, environment):
    with begun(tmp_path, environment, prompts(60, 40), 20, answers=5) as agent:
        (rank,) = (
            child
            for child in psutil.Process(agent.pid).children()
            if child.environ().get("RANK") == "1"
        )
        rank.send_signal(signal.SIGKILL)
        began = time.monotonic()
        agent.wait(timeout=60)
    assert agent.returncode and time.monotonic() - began < 10
    assert (tmp_path / "said").read_text().count("rank 1 of the pipeline was lost") == 1
    (journal,) = (Path(environment["FLEXGEN_HELM_HOME"]) / "journal").glob("*.sqlite")
    with closing(sqlite3.connect(journal)) as answers:
        ((num_drawn,),) = answers.execute("SELECT COUNT(*) FROM drawn").fetchall()
    texts, said = [], []
    for num_ranks, out in ((2, "out.jsonl"), (1, "one.jsonl")):
        done = subprocess.run(
            command(num_ranks, *BATCH, out),
            cwd=tmp_path,
            env=environment,
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout + done.stderr)
        lines = (tmp_path / out).read_text().splitlines()
        texts.append([json.loads(line)["response"]["body"]["choices"][0]["text"] for line in lines])
    assert ("goes on behind" in said[0]) == (num_drawn > 0), (
        "none is drawn where two answers have just ended"
    )
    assert len(texts[0]) == 60 and texts[0] == texts[1]


@pytest.mark.slow
def test_ranks_end_with_a_killed_torchrun(tmp_path, environment):
    """torchrun cannot end its processes if the kernel kills it; without a signal of their own they
    would go on.
    """
    with begun(tmp_path, environment, prompts(400, 30), 60, answers=1) as agent:
        ranks = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        _, alive = psutil.wait_procs(ranks, timeout=10)
    for rank in alive:
        rank.kill()
    assert len(ranks) >= 2 and not alive


@pytest.mark.slow
def test_run_gives_the_scores_of_one_process(tmp_path, environment):
    program = ("-m", "flexgen_helm", "run", "-r", *ENTRIES, "-m", "4", "--suite", "s")
    scores = []
    for name, command in (
        ("one", [*python("all"), *program]),
        ("two", torchrun_in_forks(2, *program)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        # one has not the answers of the other
        variables = {**environment, "FLEXGEN_HELM_HOME": str(folder / "home")}
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        runs = sorted((folder / "benchmark_output/runs/s").glob("*/stats.json"))
        found = [stat for run in runs for stat in json.loads(run.read_text())]
        names = ("exact_match", "logprob", "perplexity")
        scores.append(
            [(s["name"], round(s["mean"], 4)) for s in found if s["name"]["name"] in names]
        )
        record = json.loads(runs[0].with_name("flexgen_run.json").read_text())
        assert len(runs) == 2 and ("pipeline" in record) == (name == "two")
    assert scores[0] and scores[0] == scores[1]
