"""Where the project, its tests' data and the shared data sets lie."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared"

# Where fetched models are: the state folder of whoever runs the tests, whose processes have others.
USERS_HOME = Path(
    os.environ.setdefault(
        "FLEXGEN_TEST_HOME",
        os.environ.get("FLEXGEN_HELM_HOME") or str(Path.home() / ".cache" / "flexgen_helm"),
    )
)
