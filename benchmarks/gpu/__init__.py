"""`bench gpu`: one GPU: its rates, and large models in little of its memory, beside predictions, Accelerate and others.

`make gpu-check` runs the same steps and more from the sources, and needs only a few libraries (`__main__`). Each step
is a process with a limit of seconds of its own. Each result is written when it is known. Models have random weights.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks import Options
from flexgen_helm.benchmarks.common import refuse_engine_flags
from flexgen_helm.errors import UsageError

# Seconds of all steps of `bench gpu`.
_LIMIT_S, _QUICK_S = 1200, 60


def run(options: Options) -> dict[str, Any]:
    """Run the steps that need no tests; what fails is among the notes. Raises `UsageError` without a CUDA device.

    If the variable OUT names a folder, results.jsonl, table.txt and log.txt stay there.
    """
    import torch

    from flexgen_helm.benchmarks.gpu.session import Session, named_steps

    refuse_engine_flags("gpu", options)
    if not torch.cuda.is_available():
        raise UsageError("bench gpu needs a CUDA device and torch finds none: try it out with make gpu-check FAKE=1")
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        session = Session(_QUICK_S if options.quick else _LIMIT_S, Path(os.environ.get("OUT") or scratch), options.tell)
        result = session.run(named_steps(["env", "profile"] if options.quick else ["speed"]))
    result["notes"] += [f"failed: {failure}" for failure in result.pop("failed")]
    return result
