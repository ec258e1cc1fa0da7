"""The panel and the lines of a command, on a real pseudo-terminal and in a file."""

from __future__ import annotations

import subprocess

from flexgen_helm.progress import (
    Event,
    ProgressPhase,
    observed_by,
    watched,
)
from tests.helpers.forks import python
from tests.helpers.paths import ROOT
from tests.helpers.terminal import run_in_terminal

EVENTS = """
import os, subprocess, sys, time
from pathlib import Path
from flexgen_helm.cli import screen
from flexgen_helm.progress import Message, ModelInUse, PlanLine, Progress, ProgressPhase, report

log = Path(sys.argv[1]) if len(sys.argv) > 1 else None
screen.LINE_EVERY_S = 0.3
with screen.Screen(log):
    report(ProgressPhase("start"))
    time.sleep(0.6)
    report(ModelInUse("opt-30b", "4bit"))
    report(ProgressPhase("fetch", "facebook/opt-30b", 1 << 30, 4 << 30))
    time.sleep(0.6)
    report(ProgressPhase("fetch", "facebook/opt-30b", 4 << 30, 4 << 30))
    report(PlanLine("streams 62 % of the weights from disk, block of 384"))
    report(Progress(250.0, 1000, 3, 12, 5.0, {"cpu": 3 << 30}, 2, 17, 60, 102 << 30, 307 << 30, 2.125e9))
    if log is not None:
        print("a bar of HELM")
        print("a warning of HELM", file=sys.stderr)
        subprocess.run(["echo", "a child's output"])
        os.write(2, b"a library's output\\n")
    report(Message("the machine is busy"))
    time.sleep(0.6)
    if log is None:
        print("data")
        time.sleep(0.6)
print("the end")
"""
NOISE = ("a bar of HELM", "a warning of HELM", "a child's output", "a library's output")


def on_terminal(folder, *arguments):
    return run_in_terminal(
        [*python("plan"), "-c", EVENTS, *arguments], folder, {"PYTHONPATH": str(ROOT)}
    )


def test_the_panel_shows_everything_and_others_write_to_the_log(tmp_path):
    session = on_terminal(tmp_path, str(tmp_path / "log"))
    assert session.exit_code == 0, session.last
    for text in (
        "starting HELM",
        "opt-30b  4bit",
        "downloading  facebook/opt-30b",
        "1 GiB of 4 GiB",
        "250 of about 1,000 tokens",
        "3 of 12 requests, 50 tokens/s, 0:15 left",
        "streams 62 % of the weights from disk, block of 384",
        "  pass 2, layer 17 of 60: 102 GiB of about 307 GiB read, disk 2.12 GB/s",
        "memory: cpu 3 GiB",
    ):
        assert session.shown(text), text
    assert session.last.splitlines() == ["the machine is busy", "the end"]
    assert all(text in (tmp_path / "log").read_text() for text in NOISE)
    assert not any(session.shown(text) for text in NOISE)
    assert session.longest_gap_s < 2.0
    assert all(len(line) <= 100 for _, frame in session.frames for line in frame.splitlines())


def test_the_panel_makes_way_for_data(tmp_path):
    session = on_terminal(tmp_path)
    assert session.shown("250 of about 1,000 tokens")
    after = [frame for _, frame in session.frames if "data" in frame]
    assert after and not any("tokens" in frame for frame in after)
    assert session.last.splitlines() == ["the machine is busy", "data", "the end"]


LOGGER = """
import logging, sys, time
from flexgen_helm.cli.screen import Screen
from flexgen_helm.progress import ProgressPhase, report

with Screen():
    report(ProgressPhase("start"))
    logging.basicConfig(format="log: %(message)s", level=logging.INFO)  # before there is a panel
    for number in range(8):
        logging.info("line %d", number)
        time.sleep(0.3)
    print("data")
    logging.info("behind data")
logging.info("at the end")
"""


def test_lines_of_a_logger_stand_above_the_panel(tmp_path):
    """It has the stderr from before the panel, as lm-evaluation-harness's."""
    session = run_in_terminal([*python("plan"), "-c", LOGGER], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert session.exit_code == 0, session.last
    lines = [f"log: line {number}" for number in range(8)]
    assert session.last.splitlines() == [*lines, "data", "log: behind data", "log: at the end"]
    assert session.shown("starting HELM")
    assert not any(frame.count("flexgen-helm") > 1 for _, frame in session.frames)


def test_without_a_terminal_there_are_lines_and_stdout_has_data_only():
    done = subprocess.run(
        [*python("plan"), "-c", EVENTS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "data\nthe end\n"
    assert "\x1b" not in done.stderr
    assert "downloading: facebook/opt-30b: 1 GiB of 4 GiB" in done.stderr
    assert (
        "250 of about 1,000 tokens, 3 of 12 requests, 50 tokens/s, 0:15 left; pass 2, layer 17 of"
        in done.stderr
    )
    assert "the machine is busy" in done.stderr


def test_a_download_of_another_program_is_watched(tmp_path):
    (tmp_path / "before").write_bytes(bytes(1000))
    seen: list[Event] = []
    write = (
        "import time; f = open('part', 'wb', 0)\nfor i in range(8): f.write(bytes(100)); "
        "time.sleep(0.15)"
    )
    with observed_by(seen.append), watched(ProgressPhase("fetch", "file", total=800), tmp_path):
        subprocess.run([*python("plan"), "-c", write], cwd=tmp_path, check=True)
    amounts = [stage.done for stage in seen if isinstance(stage, ProgressPhase)]
    assert amounts[0] == 0 and amounts[-1] == 800 and amounts == sorted(amounts)
    assert any(0 < amount < 800 for amount in amounts)


PRECISIONS = """
import sys, threading, time
from pathlib import Path
from flexgen_helm.checkpoint import fingerprint
from flexgen_helm.cli import screen
from flexgen_helm.progress import Message, ModelInUse, PlanLine, Progress, ProgressPhase, report, watched

log, file = Path(sys.argv[1]), Path(sys.argv[2])
fingerprint._REPORT_EVERY = 1 << 20
file.write_bytes(bytes(3 << 19))
with screen.Screen(log, ["fp16", "4bit"]):
    time.sleep(0.7)
    with watched(ProgressPhase("fetch", "org/model", total=200), log.parent / "part"):
        time.sleep(0.3)
        (log.parent / "part" / "weights").write_bytes(bytes(100))
        time.sleep(0.6)
    hashing = threading.Thread(target=fingerprint.hash_file, args=[file])  # as HELM's threads do
    hashing.start()
    hashing.join()
    for precision, tokens in (("fp16", 250.0), ("4bit", 500.0)):
        report(ModelInUse("opt-30b", precision))
        report(ProgressPhase("convert", precision, 1, 4))
        time.sleep(0.4)
        report(PlanLine(f"keeps all weights of {precision} in memory"))
        report(Progress(tokens, 1000, 3, 12, 5.0, {"cpu": 3 << 30}))
        time.sleep(0.4)
        report(Message("a sentence of a library about precisions " * 4))
    report(ProgressPhase("metrics", "mcqa", 1, 4, "run"))
    time.sleep(0.4)
"""


def test_the_panel_shows_the_present_precision_and_phase_alone(tmp_path):
    (tmp_path / "part").mkdir()
    command = [*python("plan"), "-c", PRECISIONS, str(tmp_path / "log"), str(tmp_path / "file")]
    session = run_in_terminal(command, tmp_path, {"PYTHONPATH": str(ROOT)}, columns=60)
    assert session.exit_code == 0, session.last
    frames = [frame for _, frame in session.frames]
    assert not any(frame.count("downloading") > 1 for frame in frames), "a download has one bar"
    assert session.shown("100 B of 200 B") and not any(
        "verifying" in frame for frame in frames if "opt-30b" in frame
    )
    for frame in frames:
        panel = frame[frame.find("flexgen-helm ") :]
        if "4bit, 2 of 2" in panel:
            assert "fp16" not in panel and ("converting" not in panel or "requests" not in panel), (
                panel
            )
        if "computing metrics" in panel:
            assert not any(
                old in panel for old in ("4bit", "requests", "tokens/s", "keeps all", "memory: ")
            ), panel
    assert not session.shown("layer"), "nothing is read of the disk"
    assert any("4bit, 2 of 2" in frame and "converting" in frame for frame in frames)
    for precision, left in (("fp16", "0:15 left"), ("4bit", "0:05 left")):
        assert any(f"{precision}: " in frame and left in frame for frame in frames), precision
    said = session.last.splitlines()
    assert max(map(len, said)) <= 60 and {"precisions"} < {
        word for line in said for word in line.split()
    }
    assert (
        " ".join(line.strip() for line in said)
        == ("a sentence of a library about precisions " * 8).strip()
    )


def test_a_dumb_terminal_gets_the_lines_of_a_pipe(tmp_path):
    """As in Emacs: nothing can be redrawn, and a whole run would be silent."""
    command = ["env", "TERM=dumb", *python("plan"), "-c", EVENTS, str(tmp_path / "log")]
    session = run_in_terminal(command, tmp_path, {"PYTHONPATH": str(ROOT)})
    assert (
        session.exit_code == 0 and "downloading: facebook/opt-30b: 1 GiB of 4 GiB" in session.last
    )
    assert (
        "starting HELM" in session.last
        and session.last.splitlines()[-1] == "the end"
        and "━" not in session.last
    )
