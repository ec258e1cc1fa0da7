"""Real `helm-run` and `flexgen-helm run` on the fake engine, in processes of their own, and what
they leave.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.helpers.forks import python

MODEL = "flexgen/opt-125m"
ENTRIES = [f"simple_mcqa:model={MODEL}", f"simple_mcqa_scored:model={MODEL}"]
SCRIPT = Path(__file__).parent / "fake_engine.py"
RUNTIMES = {"request_time", "request_datetime", "batch_request_time", "batch_size", "cached"}


class Place:
    """A working folder with its own state; what its engine did is in `events`."""

    def __init__(self, folder: Path, *, is_cold: bool = False) -> None:
        """is_cold: its processes import everything themselves."""
        self.folder = folder
        self.python = (sys.executable,) if is_cold else python("all")
        self.log = folder / "log"

    def start(self, kind: str, *arguments: str, delay_s: float = 0.0) -> subprocess.Popen[str]:
        variables = {"FLEXGEN_HELM_HOME": str(self.folder / "home"), "FAKE_LOG": str(self.log),
                     "FAKE_DELAY_S": str(delay_s), "HF_HUB_OFFLINE": "1"}  # fmt: skip
        return subprocess.Popen(
            [*self.python, str(SCRIPT), kind, *arguments], cwd=self.folder, env={**os.environ, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            # These tests may themselves run in the background, whose children ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def run(
        self, kind: str, *arguments: str, entries: list[str] | None = None, expect: int = 0
    ) -> str:
        suite = () if "--suite" in arguments else ("--suite", "s")
        process = self.start(kind, "-r", *(entries or ENTRIES), "-m", "6", *suite, *arguments)
        output = process.communicate(timeout=90)[0]
        assert process.returncode == expect, output
        return output

    def events(self, clear: bool = True) -> Counter[str]:
        """How often each thing happened since the last look; 'answer' counts results computed."""
        log = self._log()
        if clear and log:
            self.log.unlink()
        return Counter(event for event, _ in log if event != "encode")

    def encodings(self) -> Counter[str]:
        """How often each text was encoded since the last look."""
        return Counter(value for event, value in self._log() if event == "encode")

    def _log(self) -> list[tuple[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(event, value) for event, value in map(json.loads, lines)]

    def results(self, suite: str = "s") -> dict[str, Any]:
        """Scenario states and statistics of all runs, without what is a time or depends on one."""
        found = {}
        for run in sorted((self.folder / "benchmark_output" / "runs" / suite).glob("*model=*")):
            state = json.loads((run / "scenario_state.json").read_text())
            for request_state in state["request_states"]:
                for name in RUNTIMES:
                    request_state["result"].pop(name, None)
            stats = json.loads((run / "stats.json").read_text())
            kept = [s for s in stats if "runtime" not in s["name"]["name"] and "flexgen" not in s["name"]["name"]
                    and "batch_size" not in s["name"]["name"]]  # fmt: skip
            found[run.name] = (state, kept)
        return found

    def run_folder(self, name: str) -> Path:
        return next((self.folder / "benchmark_output" / "runs" / "s").glob(f"{name}:*"))


def stats_of(folder: Path) -> dict[str, Any]:
    return {s["name"]["name"]: s for s in json.loads((folder / "stats.json").read_text())}


def figures(folder: Path) -> dict[str, float]:
    return {name: stat["mean"] for name, stat in stats_of(folder).items() if stat["count"]}
