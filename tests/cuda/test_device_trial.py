"""A GPU with a fault: what is wrong is switched off by name, said, recorded and remembered, and numbers stay right."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.hardware.process_state import ATTENTION, COPIES, REGISTERED, TRITON
from tests.helpers.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# fault -> the fast path, and how it shows.
FAULTS = {
    "wrong_kernel": (TRITON, "wrong bits"),
    "crash": (ATTENTION, "crashes by SIGSEGV"),
    "hang": (REGISTERED, "hangs: no answer for 100 s"),
    "late_copy": (COPIES, "wrong bits"),
}


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """Run the program of `tests.cuda.faulty` on a device with a fault; return what it prints."""
    start = tmp_path_factory.mktemp("start")
    (start / "sitecustomize.py").write_text("from tests.cuda.faulty import start\nstart()\n")

    def run(folder, home, fault="", *flags):
        environment = {
            "PYTHONPATH": os.pathsep.join((str(start), str(ROOT))), "FLEXGEN_HELM_HOME": str(home), "FAULT": fault,
            "FLEXGEN_HELM_HARDWARE": "t4",
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.cuda.faulty", str(folder), *flags]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_switched_off_by_name_and_numbers_are_right(tiny, tmp_path, answer, fault):
    path, reason = FAULTS[fault]
    model = tiny("llama")
    found = answer(model.path, tmp_path, fault)
    assert_right(model, found)
    (message,) = (text for text in found["messages"] if "slower" in text)
    assert path in message and reason in message
    for run in found["runs"]:
        assert list(run["record"]["hardware"]["switched_off"]) == [path]
        assert reason in run["record"]["hardware"]["switched_off"][path]
    (known,) = json.loads((tmp_path / "devices.json").read_text()).values()
    assert list(known) == [path]


def test_a_device_without_a_fault_keeps_all_and_is_tried_once(tiny, tmp_path, answer):
    model = tiny("llama")
    found = answer(model.path, tmp_path)
    assert_right(model, found)
    assert not any(run["record"]["hardware"]["switched_off"] for run in found["runs"])
    (known,) = json.loads((tmp_path / "devices.json").read_text()).values()
    assert known == {} and not found["messages"]
    # What is remembered is not tried again: a fault that came later is not found.
    again = answer(model.path, tmp_path, "wrong_kernel")
    assert not any(run["record"]["hardware"]["switched_off"] for run in again["runs"])
    with pytest.raises(AssertionError):  # and shows that these faults change numbers
        assert_right(model, again)


def test_unverified_tries_nothing_and_says_so(tiny, tmp_path, answer):
    found = answer(tiny("llama").path, tmp_path, "", "--unverified")
    assert not (tmp_path / "devices.json").exists()
    assert [run["record"]["proved"] for run in found["runs"]] == [False] * 3


def assert_right(model, found):
    """Scores are those of the host, which computes in float32: as near as 16 bits allow."""
    for run, precision in zip(found["runs"], ("fp16", "fp16", "4bit-weights")):
        asked = [GenerationRequest(prompt_token_ids=ids, max_tokens=0, echo_logprobs=True) for ids in run["tokens"]]
        with Engine.from_pretrained(model.path, device="cpu", precision=precision) as engine:
            known = [result.prompt_logprobs[1:] for result in engine.run(asked)]
        differences = torch.cat([torch.tensor(a) - torch.tensor(b) for a, b in zip(run["scores"], known)]).abs()
        assert differences.max() < 5e-2 and differences.mean() < 5e-3, (precision, differences.max())
