"""The end of a process that runs HELM."""

from __future__ import annotations

import os
import subprocess

from tests.helpers.forks import python
from tests.helpers.paths import ROOT

# The model's thread is inside PyTorch, hears nothing, and comes back to Python while that is being taken down.
DEAF = """
import sys, threading
from flexgen_helm.plugin.context import set_context
from flexgen_helm.service import service
from tests.helpers.fake_engine import FakeLoader, fake_context

busy = threading.Event()

def make(model):
    import torch
    values = torch.randn(300, 300)
    busy.set()
    while True:
        values @ values

service.SHUTDOWN_S = 0.1
context = fake_context(FakeLoader(make))
set_context(context)
context.service.preload(context.find_model("flexgen/opt-125m"))
busy.wait()
context.exit_code = 2
print("said", end="")
sys.exit(2)
"""


def test_a_thread_that_hears_nothing_leaves_the_exit_code_of_the_suite() -> None:
    command, environment = [*python("all"), "-c", DEAF], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "said", "")
