"""The lives of requests, weights and cached tokens in docs/developers/architecture.md name the
files that they pass.
"""

import json
import os
import re
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.checkpoint.quantized.logical_tensor import LogicalTensor
from flexgen_helm.checkpoint.stored_tensors import StoredTensor
from flexgen_helm.files import closest
from flexgen_helm.offload.matrices import OffloadedMatrix
from flexgen_helm.offload.prefetcher import RingSlot, StreamedMatrix
from flexgen_helm.offload.weights import Weight
from flexgen_helm.planner.storage_sizes import StorageSizes
from tests.helpers.forks import python
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs/developers/architecture.md"
# What a request becomes on its way, by class. HELM's own are Request and RequestResult.
FORMS = [
    "Request", "HelmRequest", "Job", "GenerationRequest", "EncodedRequests", "Sequence",
    "ScheduledTokens", "Batch", "AttentionMetadata", "Prediction", "SequenceOutput",
    "BatchOutput", "Completion", "GenerationResult", "Response", "RequestResult",
]  # fmt: skip
# A file counts where one of its functions is given such an object, or a list or dictionary of them,
# or returns one.
PROGRAM = """
import json, sys, threading
from helm.common.request import Request
import flexgen_helm
from flexgen_helm import GenerationRequest
from flexgen_helm.plugin.client import FlexgenClient

forms, root = set(json.loads(sys.argv[2])), flexgen_helm.__path__[0] + "/"
files, met = set(), set()

def form(value, depth=2):
    name = type(value).__name__
    if name in forms:
        return name
    items = [*value.values(), *value] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next(filter(None, (form(item, depth - 1) for item in items[:2])), None) if depth else None

def profile(frame, event, returned):
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(root):
        return
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if event == "call" else ()
    for value in (*map(frame.f_locals.get, names), returned):
        if found := form(value):
            met.add(found)
            files.add(code.co_filename.removeprefix(root))

client = FlexgenClient("flexgen/tiny", path=sys.argv[1], device="cpu")
threading.setprofile(profile)
sys.setprofile(profile)
request = Request("flexgen/tiny", "flexgen/tiny", prompt="the quick fox", temperature=0, max_tokens=3, echo_prompt=True)
result = client.make_request(request)
sys.setprofile(None)
assert result.success, result.error

# What requests can meet besides: shared prefixes, several completions, caches on the disk, quantized ones.
prompts = [[*range(2, 62), 70 + number] for number in range(4)]
asked = [GenerationRequest(prompt_token_ids=ids, max_tokens=9, n=2, temperature=1.0, seed=1) for ids in prompts]
for precision, computed in (("fp16", 60 + 4), ("4bit-cache", 8 * 61)):
    options = {"device": "cpu", "policy": "2x2,0,100,0,0,0,0", "precision": precision}
    with flexgen_helm.Engine.from_pretrained(sys.argv[1], **options) as engine:
        engine.share_every_beginning()
        sys.setprofile(profile)
        results = engine.run(asked)
        sys.setprofile(None)
        assert engine.last_run["bytes"]["cpu_to_disk"]["cache"] and not any(result.error for result in results)
        assert round(engine.last_run["workload"]["prompt_tokens_computed"]) == computed, engine.last_run["workload"]
print(json.dumps([sorted(files), sorted(met)]))
"""


def listed(page, life="request"):
    """The files in the table of the section."""
    section = page.split(f"## The life of a {life}")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\S+)` \|", section, flags=re.MULTILINE))


def test_the_page_lists_the_files_that_a_request_passes(tiny, tmp_path):
    environment = {**os.environ, "FLEXGEN_HELM_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [*python("all"), "-c", PROGRAM, str(tiny("llama").path), json.dumps(FORMS)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    files, met = json.loads(done.stdout)
    assert met == sorted(FORMS), "a form of a request has another name now"
    page = PAGE.read_text()
    assert listed(page) == set(files)
    assert f"{len(files)} files" in page


def files_given(holds, work):
    """The files of functions that are given a value, or return one, while `work` runs, in whatever
    thread.
    """
    root, files = f"{ROOT}/flexgen_helm/", set()

    def has(value, depth=2):
        items = (
            list(value.values())
            if isinstance(value, dict)
            else value
            if isinstance(value, (list, tuple))
            else ()
        )
        return holds(value) or (depth > 0 and any(has(item, depth - 1) for item in items[:3]))

    def profile(frame, event, returned):
        code = frame.f_code
        if event in ("call", "return") and code.co_filename.startswith(root):
            names = (
                code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                if event == "call"
                else ()
            )
            if any(map(has, (*map(frame.f_locals.get, names), returned))):
                files.add(code.co_filename.removeprefix(root))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return files


# what stands for a weight
HANDLES = (StoredTensor, LogicalTensor, OffloadedMatrix, StreamedMatrix, RingSlot, Weight)
ASKED = [
    GenerationRequest(prompt_token_ids=[*range(2, 68), 70 + n], max_tokens=9, n=2, seed=1)
    for n in range(3)
]


def compute(path, **options):
    with Engine.from_pretrained(path, device="cpu", **options) as engine:
        engine.share_every_beginning()
        assert not any(result.error for result in engine.run(ASKED))


@pytest.mark.parametrize("life", ["weight", "cached token"])
def test_the_page_lists_the_files_that_carry_a_weight_and_a_cached_token(tiny, tmp_path, life):
    """Told by their sizes: MLP matrices of 48 x 80 values in 16 bits, keys and values of 2 heads
    with 8 elements.
    """

    def is_weight(value):
        if isinstance(value, torch.Tensor):
            return value.numel() == 48 * 80 or (
                value.dtype == torch.uint8 and value.numel() in (7680, 8192)
            )
        return isinstance(value, HANDLES)

    def is_cached_token(value):
        is_tensor = isinstance(value, torch.Tensor) and value.dim() >= 3
        return is_tensor and value.shape[-1] == 8 and 2 in value.shape[:-1]

    path = tiny("llama").path
    if life == "weight":
        files = files_given(
            is_weight, lambda: compute(path, offload_dir=tmp_path, policy="2x2,0,0,0,100,0,100")
        )
    else:
        files = set()
        for more in ({}, {"precision": "4bit-cache"}):
            on_disk = partial(
                compute, path, offload_dir=tmp_path, policy="2x2,0,100,0,0,0,0", **more
            )
            files |= files_given(is_cached_token, on_disk)
    page = PAGE.read_text()
    assert listed(page, life) == files, " ".join(sorted(files))
    assert f"{len(files)} files" in page.split(f"## The life of a {life}")[1].split("\n## ")[0]


def test_a_file_is_seen_that_is_given_a_value():
    def work():
        return closest("smolm", ["smollm2", "opt-125m"])

    assert files_given(lambda value: value == "smolm", work) == {"files.py"}
    assert files_given(lambda value: value == "another", work) == set()


def order_of_packages(page):
    """Packages from the bottom up, as the page's first table has them."""
    return re.findall(r"^\| `(\w+)/` \|", page.split("Beside the package")[0], flags=re.MULTILINE)


def climbs_of(work, order):
    """Calls of `work` from a package to one above it: what a lower one was given, it calls."""
    root, climbs = f"{ROOT}/flexgen_helm/", set()

    def package(path):
        name = path.removeprefix(root).partition("/")[0]
        return name if path.startswith(root) and name in order else None

    def profile(frame, event, argument):
        callee, caller = package(frame.f_code.co_filename), frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(root):
            caller = caller.f_back
        called_by = None if caller is None else package(caller.f_code.co_filename)
        # generators are values
        is_call = event == "call" and not frame.f_code.co_name.startswith("<")
        if is_call and callee and called_by and order.index(callee) > order.index(called_by):
            climbs.add((called_by, callee))

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return climbs


def test_the_walk_along_a_run_goes_up_where_the_page_says_so(tiny, tmp_path, monkeypatch):
    """Streamed weights, so that the run is searched; and it is compared, so that it teaches."""
    monkeypatch.setattr("flexgen_helm.planner.staging.MIN_STAGING_BYTES", 1 << 15)
    path, page = tiny("llama").path, PAGE.read_text()
    limit = int(0.9 * sum(StorageSizes(read_model_config(path)[0]).matrices.values()))
    prompts = [[2 + (5 * number + i) % 300 for i in range(12)] for number in range(9)]
    asked = [GenerationRequest(prompt_token_ids=prompt, max_tokens=4) for prompt in prompts]
    with Engine.from_pretrained(
        path, device="cpu", limits=MemoryLimits(cpu=limit), offload_dir=tmp_path
    ) as engine:
        climbs = climbs_of(lambda: engine.run(asked), order_of_packages(page))
        assert engine.last_run["predicted_latency_s"] > 0 and "wc" in engine.last_run["policy"]
    section = page.split("## The walk along `Engine.run`")[1].split("\n## ")[0]
    assert climbs == set(re.findall(r"^\| `(\w+)/` calls `(\w+)/` \|", section, flags=re.MULTILINE))


def test_a_call_upwards_is_seen():
    """Turned upside down, the order makes a climb of a call that goes down."""
    from flexgen_helm.planner.policy import Policy
    from flexgen_helm.planner.predict import predict
    from flexgen_helm.planner.schedules import ZIGZAG
    from tests.helpers.planning_problems import small

    order = order_of_packages(PAGE.read_text())
    assert order.index("models") < order.index("planner")

    def work():
        return predict(small(200, 400), Policy(24, 1), ZIGZAG)

    assert climbs_of(work, order) == set() and ("planner", "models") in climbs_of(work, order[::-1])
