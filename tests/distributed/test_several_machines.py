"""`flexgen-helm run --ray` and HELM's Slurm runner in processes of their own, killed and resumed.
Minutes.
"""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from tests.helpers import fake_slurm
from tests.helpers.helm_runs import RUNTIMES
from tests.helpers.shares import only_whole

pytestmark = pytest.mark.slow
ENTRIES = [
    "synthetic_reasoning:mode=pattern_match,model=flexgen/tiny",
    "simple_mcqa_scored:model=flexgen/tiny",
]
TWO_WORKERS = ("--ray", "local", "--ray-cores", "1", "--ray-workers", "2")
PROGRAM = Path(sys.executable).with_name("flexgen-helm")


class Suite:
    """A folder with a state of its own, and the environment of its processes."""

    def __init__(self, folder, model):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "models.yaml").write_text(json.dumps({"tiny": {"path": str(model)}}))
        self.environment = {**os.environ, "FLEXGEN_HELM_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1",
                            "FLEXGEN_HELM_MODELS": str(folder / "models.yaml"), "NO_COLOR": "1"}  # fmt: skip

    def start(self, *flags, instances=300):
        command = [PROGRAM, "run", "-r", *ENTRIES, "-m", str(instances), "--suite", "s", *flags]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def run(self, *flags, expect=0, instances=300):
        process = self.start(*flags, instances=instances)
        output = process.communicate(timeout=240)[0]
        assert process.returncode == expect, output
        return output

    def scores(self):
        """Completions and statistics of all runs, without what is a time."""
        found = {}
        for run in sorted((self.folder / "benchmark_output" / "runs" / "s").glob("*model=*")):
            states = json.loads((run / "scenario_state.json").read_text())["request_states"]
            texts = [
                [completion["text"] for completion in state["result"]["completions"]]
                for state in states
            ]
            stats = {
                json.dumps(stat["name"], sort_keys=True): stat["mean"]
                for stat in json.loads((run / "stats.json").read_text())
                if stat["count"]
                and not any(
                    word in stat["name"]["name"] for word in (*RUNTIMES, "runtime", "flexgen")
                )
            }
            found[run.name] = texts, stats
        return found

    def num_stored(self):
        total = 0
        for path in (self.folder / "home" / "journal").glob("*.sqlite"):
            # Not read-only: after a kill, whoever opens the file first brings its log into it.
            connected = closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=30))
            with suppress(sqlite3.OperationalError), connected as connection:  # no table yet
                total += connection.execute("SELECT count(*) FROM answers").fetchone()[0]
        return total

    def record(self):
        """Return the usage of the one model."""
        content = json.loads(
            (self.folder / "benchmark_output" / "runs" / "s" / "flexgen_suite.json").read_text()
        )
        (usage,) = content["models"].values()
        return dict(usage)


def assert_same_scores(ours, expected):
    """Text metrics exactly, log-probabilities to 1e-4, as the project defines equal scores."""
    assert ours.keys() == expected.keys() and len(ours) == 2
    for name, (texts, stats) in expected.items():
        assert ours[name][0] == texts
        assert ours[name][1] == pytest.approx(stats, rel=1e-4), name


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama").path


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """A finished suite of one process."""
    suite = Suite(tmp_path_factory.mktemp("alone"), model)
    suite.run()
    return suite


@pytest.fixture
def suite(model, tmp_path):
    return Suite(tmp_path, model)


def eventually(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


@pytest.fixture
def ray_installed():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'flexgen-helm[ray]'")


def test_a_local_cluster_of_two_gives_the_scores_of_one_process(alone, suite, ray_installed):
    suite.run(*TWO_WORKERS)
    assert_same_scores(suite.scores(), alone.scores())
    workers = suite.record()["workers"]
    assert {worker["num_requests"] > 0 for worker in workers} == {True} and len(workers) == 2
    assert (
        sum(worker["num_requests"] for worker in workers)
        == suite.record()["workload"]["num_unique"]
    )
    # Answers of a cluster are those of one process, and reused by it.
    stored = suite.num_stored()
    suite.run()
    assert suite.num_stored() == stored == alone.num_stored()


def test_a_killed_driver_leaves_no_process_and_its_answers(alone, suite, ray_installed):
    process = suite.start(*TWO_WORKERS)
    eventually(lambda: suite.num_stored() >= 20)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert children
    _, alive = psutil.wait_procs(children, timeout=30)
    # Ray's own, small
    assert {child.name() for child in alive} <= {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
    assert not psutil.wait_procs(alive, timeout=120)[1]
    stored = suite.num_stored()
    assert 20 <= stored < alone.num_stored()
    suite.run(*TWO_WORKERS)
    assert_same_scores(suite.scores(), alone.scores())
    records = suite.record()
    assert records["workload"]["num_unique"] == alone.record()["workload"]["num_unique"]
    assert (
        sum(worker["num_requests"] for worker in records["workers"]) <= alone.num_stored() - stored
    )


@pytest.fixture
def cluster(monkeypatch):
    """A Ray that was started by hand, as on a cluster: its address and its first process."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    folder = tempfile.mkdtemp(prefix="ray")  # short: it contains sockets
    flags = [
        f"--temp-dir={folder}",
        "--num-cpus=2",
        "--include-dashboard=false",
        "--object-store-memory=100000000",
        "--block",
    ]
    head = subprocess.Popen(
        [ray, "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        eventually(lambda: _listens(port))
        time.sleep(5)  # the head listens before its first node has registered
        yield f"127.0.0.1:{port}", psutil.Process(head.pid)
    finally:
        processes = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        for process in processes:
            process.terminate()
        for process in psutil.wait_procs(processes, timeout=10)[1]:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@only_whole
def test_a_worker_is_killed_on_a_cluster_that_was_started_by_hand(
    ray_installed, alone, cluster, model, tmp_path
):
    address, head = cluster
    # all is answered within a second of the first answer: the kill may come too late
    for attempt in range(5):
        suite = Suite(tmp_path / str(attempt), model)
        process = suite.start("--ray", address, "--ray-cores", "1")
        worker = eventually(lambda: _a_worker(head))
        eventually(lambda suite=suite: suite.num_stored() >= 20)
        worker.kill()
        output = process.communicate(timeout=240)[0]
        assert process.returncode == 0, output
        assert_same_scores(suite.scores(), alone.scores())
        if "is lost" in output:
            break
    else:
        raise AssertionError(output)
    assert suite.num_stored() == alone.num_stored()
    suite.run("--ray", address, "--ray-cores", "1")  # the cluster goes on, and everything is stored
    assert suite.num_stored() == alone.num_stored()


def _a_worker(head):
    for process in head.children(recursive=True):
        with suppress(psutil.Error):
            if "MapBatches(Worker)" in " ".join(process.cmdline()):
                return process
    return None


def test_an_address_without_a_cluster_is_one_sentence(suite, ray_installed):
    output = suite.run("--ray", "127.0.0.1:1", expect=2)
    assert "there is no Ray cluster at 127.0.0.1:1" in output.splitlines()[-1]


def test_helms_slurm_runner_runs_our_models(model, tmp_path):
    """The commands of docs/how-to/several-machines.md, on a Slurm that is this machine."""
    pytest.importorskip(
        "simple_slurm", reason=("HELM's Slurm runner needs it: pip install 'crfm-helm[slurm]'")
    )
    plain, jobs = Suite(tmp_path / "plain", model), Suite(tmp_path / "jobs", model)
    plain.run(instances=6)
    jobs.environment |= {"PATH": fake_slurm.install(jobs.folder / "slurm_of_one")["PATH"]}
    jobs.run("--dry-run", instances=6)
    assert not list((jobs.folder / "benchmark_output").rglob("s/*/stats.json"))
    (jobs.folder / "prod_env" / "runner_config.yaml").write_text(
        "helm_max_concurrent_workers: 2\nslurm_monitor_interval: 1\nslurm_args: {cpus_per_task: "
        '"1", mem: 8G}\n'
    )
    command = [
        Path(sys.executable).with_name("helm-run"),
        "-r",
        *ENTRIES,
        "-m",
        "6",
        "--suite",
        "s",
    ]
    command += ["--runner-class-name", "helm.benchmark.slurm_runner.SlurmRunner"]
    done = subprocess.run(
        command, cwd=jobs.folder, env=jobs.environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert len(list((jobs.folder / "slurm_of_one" / "jobs").iterdir())) == len(ENTRIES)
    assert_same_scores(jobs.scores(), plain.scores())
