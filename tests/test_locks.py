"""Locks among processes, also on file systems that have none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from flexgen_helm import cli, locks
from flexgen_helm.concurrency import stopped_by
from flexgen_helm.errors import Interrupted, UsageError
from flexgen_helm.files import append
from flexgen_helm.locks import InUseError, locked, sole_writer, written_whole
from flexgen_helm.paths import state_lock, update_state
from flexgen_helm.progress import Message, observed_by
from tests.helpers.paths import ROOT
from tests.helpers.small_disks import read_only, small_disk

_HOLD = """
import errno, sys
from pathlib import Path
from flexgen_helm import locks
def refused(*_): raise OSError(errno.ENOSYS, "no locks")
if sys.argv[2]: locks.fcntl.flock = refused
with locks.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
without_locks = pytest.mark.parametrize(
    "code", [0, errno.ENOSYS, errno.ENOLCK], ids=["locks", "no locks", "no lock daemon"]
)


def refuse(monkeypatch, code):
    """Let the file system answer `flock` with an error; 0: as usual."""

    def refused(*_):
        raise OSError(code, os.strerror(code))

    if code:
        monkeypatch.setattr(locks.fcntl, "flock", refused)


@contextmanager
def held_elsewhere(path, code):
    command = [sys.executable, "-c", _HOLD, str(path), "x" if code else ""]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process


@without_locks
def test_one_process_has_a_lock_and_is_named(tmp_path, monkeypatch, code):
    refuse(monkeypatch, code)
    path = tmp_path / "new" / "a.lock"
    with held_elsewhere(path, code) as process:
        with (
            pytest.raises(
                InUseError, match=(rf"^{path} is locked by process {process.pid}\b.*; wait")
            ),
            locked(path, 0),
        ):
            pass
        process.kill()  # it leaves what it leaves
    with (
        locked(path, 5),
        pytest.raises(InUseError, match=f"process {os.getpid()}"),
        locked(path, 0),
    ):
        pass
    with locked(path, 0):
        pass


def test_an_old_file_of_a_machine_with_locks_is_no_lock(tmp_path, monkeypatch):
    """The home is copied onto a file system without locks, as docs/how-to/offline.md says."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    (tmp_path / "hashes.json.lock").touch()
    refuse(monkeypatch, errno.ENOSYS)
    with locked(tmp_path / "hashes.json.lock", 0):
        pass
    update_state("hashes.json", lambda content: content.update(a=1))
    assert {path.name for path in tmp_path.iterdir()} == {"hashes.json", "hashes.json.lock"}


def test_a_wait_is_told_and_can_be_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "TELL_AFTER_S", 0.1)
    told: list[str] = []
    path = tmp_path / "lock"

    def observe(event):
        if isinstance(event, Message):
            told.append(event.text)

    waits = observed_by(observe), stopped_by(lambda: bool(told)), pytest.raises(Interrupted)
    with locked(path), waits[0], waits[1], waits[2], locked(path):
        pass
    assert told == [f"waiting for {path}, which process {os.getpid()} has locked"]


def test_a_home_that_is_read_only_is_read_without_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    with read_only(tmp_path / "home"), state_lock("a.lock"), state_lock("a.lock"):
        update_state("facts.json", lambda content: content.update(a=1))


@without_locks
@pytest.mark.parametrize(
    "words, refused",
    [
        (["batch", "in", "--model", "opt-125m", "-o", "out"], "-o"),
        (["verify", "in", "--requests", "in", "--bundle", "out"], "--bundle"),
        (
            [
                "run",
                "-r",
                "simple_mcqa:model=flexgen/opt-125m",
                "-m",
                "1",
                "-o",
                ".",
                "--suite",
                "out",
            ],
            "--suite",
        ),
    ],
)
def test_an_output_has_one_writer(tmp_path, monkeypatch, capsys, code, words, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    (tmp_path / "in").write_text("{}\n")
    (tmp_path / "out.partial").write_text("a line\n")
    folder = tmp_path / "runs" if words[0] == "run" else tmp_path
    with held_elsewhere(folder / ".out.lock", code) as process:
        refuse(monkeypatch, code)
        assert cli.main(words) == 1
        said = capsys.readouterr().err
        assert f"{refused}: " in said and f"out is written by process {process.pid}" in said
        process.kill()
    assert (tmp_path / "out.partial").read_text() == "a line\n" and not (folder / "out").exists()


_WRITE = """
import sys, time
from pathlib import Path
from flexgen_helm.errors import FlexgenError
from flexgen_helm.files import append
from flexgen_helm.locks import written_whole
print("ready", flush=True)
sys.stdin.readline()
try:
    with written_whole(Path(sys.argv[1]), "-o") as file:
        for number in range(100):
            append(file, f"{sys.argv[2]}\\n".encode())
            time.sleep(0.01)
except FlexgenError as error:
    print(error, flush=True)
else:
    print("written", flush=True)
"""


@pytest.mark.parametrize("number", [2, 8])
def test_of_several_writers_one_works(tmp_path, number):
    out, command = tmp_path / "out", [sys.executable, "-c", _WRITE, str(tmp_path / "out")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    writers = [subprocess.Popen([*command, str(n)], **pipes) for n in range(number)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    said = [writer.communicate()[0].strip() for writer in writers]
    (winner,) = [n for n, text in enumerate(said) if text == "written"]
    assert out.read_text() == f"{winner}\n" * 100
    named = (
        f"-o: {out} is written by process {writers[winner].pid}; wait until that has ended, or "
        "give another name"
    )
    assert {text for n, text in enumerate(said) if n != winner} == {named}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_written_replaces_a_file_whole(tmp_path):
    path = tmp_path / "a"
    path.write_text("old\n")
    with pytest.raises(KeyError), written_whole(path, "-o") as file:
        append(file, b"half")
        raise KeyError
    assert path.read_text() == "old\n" and (tmp_path / "a.partial").read_text() == "half"
    with pytest.raises(OSError) as caught, written_whole(path, "-o"):
        raise OSError(5, "Input/output error", "another file")
    assert caught.value.filename == "another file"
    with written_whole(path, "-o") as file:
        append(file, b"new\n")
        assert path.read_text() == "old\n"
    assert path.read_text() == "new\n" and [file.name for file in tmp_path.iterdir()] == ["a"]
    refused = pytest.raises(UsageError, match=r"^-o: .*/no/a cannot be written: ")
    with refused, read_only(tmp_path), sole_writer(tmp_path / "no" / "a", "-o"):
        pass


def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys):
    full = pytest.raises(OSError, match="No space left")
    with (
        small_disk(tmp_path / "disk", 16384) as disk,
        full as caught,
        written_whole(disk / "out", "-o") as file,
    ):
        append(file, b"x" * 20_000)
    assert caught.value.filename == str(disk / "out.partial")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["--version"]) == 1
    said = "flexgen-helm: /dev/stdout cannot be used: No space left on device; free some room\n"
    assert capsys.readouterr().err == said
