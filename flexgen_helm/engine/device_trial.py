"""A GPU proves itself where it computes: each fast path equals a slower one there, or is switched off by name.

    key      device, driver, PyTorch, Triton, and our modules that compute on it
    known    `devices.json` in the home folder: nothing is computed
    else     a child process (`device_steps`) runs a small model without fast paths, and then takes them one by one,
             each on top of those that passed; behind one that differs, fails, crashes or hangs the next child goes on

docs/explanation/exactness.md has what each is compared with.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from flexgen_helm.checkpoint.paths import read_state, update_state
from flexgen_helm.engine.proof import one_process_at_a_time
from flexgen_helm.errors import UnprovedModelError
from flexgen_helm.hardware.process_state import FAST_PATHS, PLAIN, switch_off
from flexgen_helm.identity import own_digest
from flexgen_helm.progress import ProgressPhase, report

DEVICES = "devices.json"
# Seconds after which a child hangs, its start and all paths included.
TRIAL_S = 180
# Policies are given, so any GPU's rates will do; compiled loops of the host are tried elsewhere.
_VARIABLES = {"FLEXGEN_HELM_HARDWARE": "t4", "FLEXGEN_HELM_LOOPS": "0"}


def require_trial(device: torch.device, unverified: bool) -> bool:
    """Switch off the fast paths that are wrong on a device, tried where nothing is known; return whether it is known.

    unverified: nothing is tried.
    Raises `UnprovedModelError` where even plain PyTorch is wrong, or nothing can be tried.
    """
    if device.type != "cuda":
        return True
    failed = known_failures(device)
    if failed is None and not unverified:
        with one_process_at_a_time():
            failed = known_failures(device)
            if failed is None:  # nor by another process meanwhile
                report(ProgressPhase("try", torch.cuda.get_device_name(device)))
                failed = _tried(device)
                if not any("out of memory" in reason for reason in failed.values()):
                    update_state(DEVICES, lambda content: content.update({_key(device): failed}))
    for name, reason in (failed or {}).items():
        switch_off(name, reason)
    return failed is not None


def known_failures(device: torch.device) -> dict[str, str] | None:
    """Return the fast paths that were wrong on a device here, with the reasons; None where none was tried."""
    found: dict[str, str] | None = read_state(DEVICES).get(_key(device))
    return found


def _key(device: torch.device) -> str:
    driver = Path("/proc/driver/nvidia/version")
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = ""
    parts = (
        torch.cuda.get_device_name(device),
        driver.read_text(encoding="utf-8") if driver.is_file() else "",
        torch.__version__,
        triton,
        *map(own_digest, ("engine", "kernels", "kv_cache", "models", "offload", "quant")),
    )
    return "; ".join(part.partition("\n")[0] for part in parts)


def _tried(device: torch.device) -> dict[str, str]:
    """Try all fast paths; return those that are wrong, with the reasons."""
    failed: dict[str, str] = {}
    rest = [PLAIN, *FAST_PATHS]
    while rest:
        passed, reason = _in_child(device, rest, list(failed))
        rest = rest[passed:]
        if rest and rest[0] == PLAIN:
            raise UnprovedModelError(
                f"{torch.cuda.get_device_name(device)} is not used: without any fast path a small model {reason}; take "
                "--device cpu, or add --unverified to compute on it all the same"
            )
        if rest:
            failed[rest.pop(0)] = reason
    return failed


def _in_child(device: torch.device, names: Sequence[str], off: Sequence[str]) -> tuple[int, str]:
    """Try paths in a new process, with `off` switched off; return how many passed, and what is wrong with the next."""
    paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **_VARIABLES}
    arguments = json.dumps([str(device), list(names), list(off)])
    command = [sys.executable, "-P", "-m", "flexgen_helm.engine.device_steps", arguments]
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=TRIAL_S, check=False
        )
        told, code = child.stdout, child.returncode
        said = child.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {code}"
        reason = f"crashes by {signal.Signals(-code).name}" if code < 0 else f"fails: {said}"
    except subprocess.TimeoutExpired as error:
        told, reason = error.stdout or b"", f"hangs: no answer for {TRIAL_S} s"
    lines = told.decode().splitlines()
    if lines and lines[-1].startswith("wrong: "):
        reason = lines[-1].removeprefix("wrong: ")
    return lines.count("right"), reason
