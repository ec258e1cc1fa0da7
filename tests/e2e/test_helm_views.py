"""`helm-summarize` and `helm-server` on runs of ours: processes of HELM, which load no plugin, and a real browser."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.helm_runs import MODEL, Place

# HELM's tables show scenarios that describe themselves; `simple_mcqa` does not.
GROUP = "synthetic_reasoning_natural"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def helm(name: str, *arguments: str) -> list[str]:
    """A command of HELM, by its module: `helm-summarize` is helm.benchmark.presentation.summarize."""
    return [sys.executable, "-c", f"import sys; from {name} import main; sys.exit(main())", *arguments]


@pytest.fixture(scope="module")
def summarized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite of one run, summarized; returns the working folder."""
    place = Place(tmp_path_factory.mktemp("views"))
    place.run("suite", entries=[f"{GROUP}:difficulty=easy,model={MODEL}"])
    command = helm("helm.benchmark.presentation.summarize", "--suite", "s", "--auto-generate-schema")
    done = subprocess.run(
        command, cwd=place.folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return place.folder


@pytest.fixture(scope="module")
def server(summarized: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = helm("helm.benchmark.server", "--suite", "s", "--port", str(port))
    process = subprocess.Popen(command, cwd=summarized, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://localhost:{port}"
    try:
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            try:
                urllib.request.urlopen(address, timeout=2).close()
                break
            except OSError:
                assert process.poll() is None, "helm-server ended"
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(10)


def test_the_summary_has_our_throughput_beside_the_scores(summarized: Path) -> None:
    suite = summarized / "benchmark_output" / "runs" / "s"
    schema = json.loads((suite / "schema.json").read_text())
    assert {"flexgen_padded_throughput", "flexgen_actual_throughput", "flexgen_efficiency"} <= {
        metric["name"] for metric in schema["metrics"]
    }
    tables = json.loads(next((suite / "groups").glob(f"{GROUP}*.json")).read_text())
    headers = [cell["value"] for table in tables for cell in table["header"]]
    assert any("Padded tok/s" in str(header) for header in headers), headers
    (run,) = suite.glob(f"{GROUP}:*")
    record = json.loads((run / "flexgen_run.json").read_text())
    shown = [cell.get("value") for table in tables for row in table["rows"] for cell in row]
    assert pytest.approx(record["padded_throughput"], rel=1e-3) in [x for x in shown if isinstance(x, float)]


@pytest.mark.skipif(BROWSER is None, reason="no chromium here to open the page with")
def test_a_browser_shows_our_runs_in_helms_pages(server: str, tmp_path: Path) -> None:
    def page(path: str) -> str:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
        command = [str(BROWSER), *options, f"--user-data-dir={tmp_path / 'profile'}", f"{server}/#/{path}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout

    group = page(f"groups/{GROUP}")
    assert "Padded tok/s" in group and "Efficiency" in group
    assert "flexgen" in page("runs")
