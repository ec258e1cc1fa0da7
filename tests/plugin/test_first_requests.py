"""Requests of a new process for a model that no run has submitted: a judge, or HELM's client used
by itself.
"""

import json
import os
import subprocess
import sys

import yaml

REQUESTS = """
import json, sys, threading
from concurrent.futures import ThreadPoolExecutor
from helm.benchmark.run import load_entry_point_plugins
from helm.clients.auto_client import AutoClient
from helm.common.cache_backend_config import BlackHoleCacheBackendConfig
from helm.common.request import Request
from flexgen_helm.tokenizer.tokenizer import Tokenizer

load_entry_point_plugins()
loads, load = [], Tokenizer.from_path

def from_path(path):
    loads.append(threading.current_thread().name)
    return load(path)

Tokenizer.from_path = from_path
client = AutoClient({}, "storage", BlackHoleCacheBackendConfig())
threads, count = int(sys.argv[1]), int(sys.argv[2])
start = threading.Barrier(threads)

def send(index):
    if index < threads:
        start.wait(30)  # the first request of every thread at once
    model = dict(model="flexgen/tiny", model_deployment="flexgen/tiny")
    result = client.make_request(Request(prompt=f"the quick {index}", temperature=0, max_tokens=2, **model))
    return result.error or len(result.completions[0].tokens)

with ThreadPoolExecutor(threads) as pool:
    print(json.dumps({"results": list(pool.map(send, range(count))), "loads": loads}))
"""


def test_parallel_first_requests_load_a_folder_model_once(tiny, tmp_path):
    """`transformers` replaces itself at the end of its import: other threads then found no name in
    it.
    """
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"tiny": str(tiny("llama").path)}))
    variables = {
        "FLEXGEN_HELM_MODELS": str(tmp_path / "models.yaml"),
        "FLEXGEN_HELM_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(
        [sys.executable, "-c", REQUESTS, "16", "32"], cwd=tmp_path, env={**os.environ, **variables},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    assert output["results"] == [2] * 32
    # for HELM, and the engine's own
    assert len(output["loads"]) == 2 and output["loads"].count("flexgen-engine") == 1
