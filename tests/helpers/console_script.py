"""The installed `flexgen-helm`, run as a process that says what it imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(sys.executable).with_name("flexgen-helm")
# What takes seconds to import: not before a command needs it.
HEAVY = {"torch", "transformers", "helm", "datasets"}
_IMPORT = re.compile(r"^import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$", re.MULTILINE)
_OF_IMPORTS = re.compile(r"import time:|^[ \d|]*\| +\S+\n$")


@dataclass(frozen=True)
class Finished:
    """A finished process; imports: names of top-level packages."""

    code: int
    out: str
    err: str
    imports: frozenset[str]

    @property
    def heavy(self) -> set[str]:
        return HEAVY & self.imports


def run_script(*arguments: str, **environment: str) -> Finished:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **environment},
    )
    modules = _IMPORT.findall(done.stderr)
    # A line of imports may be in two parts, where two threads import.
    lines = [line for line in done.stderr.splitlines(keepends=True) if not _OF_IMPORTS.search(line)]
    return Finished(
        done.returncode,
        done.stdout,
        "".join(lines),
        frozenset(name.split(".")[0] for name in modules),
    )
