"""Locks among processes, also on file systems that have none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexgen_helm import cli, locks
from flexgen_helm.checkpoint.paths import state_lock, update_state
from flexgen_helm.concurrency import stopped_by
from flexgen_helm.errors import Interrupted
from flexgen_helm.files import append
from flexgen_helm.locks import InUseError, locked, sole_writer
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
without_locks = pytest.mark.parametrize("code", [0, errno.ENOSYS], ids=["locks", "no locks"])


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Let the file system answer `flock` with an error; 0: as usual."""

    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    if code:
        monkeypatch.setattr(locks.fcntl, "flock", refused)


@contextmanager
def held_elsewhere(path: Path, code: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _HOLD, str(path), "x" if code else ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process


@without_locks
def test_one_process_has_a_lock_and_is_named(tmp_path, monkeypatch, code):
    refuse(monkeypatch, code)
    path = tmp_path / "new" / "a.lock"
    with held_elsewhere(path, code) as process:
        with pytest.raises(InUseError, match=rf"^{path} is locked by process {process.pid}\b.*; wait"), locked(path, 0):
            pass
        process.kill()  # it leaves what it leaves
    with locked(path, 5), pytest.raises(InUseError, match=f"process {os.getpid()}"), locked(path, 0):
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

    def observe(event: object) -> None:
        if isinstance(event, Message):
            told.append(event.text)

    waits = observed_by(observe), stopped_by(lambda: bool(told)), pytest.raises(Interrupted)
    with locked(path), waits[0], waits[1], waits[2], locked(path):
        pass
    assert told == [f"waiting for {path}, which process {os.getpid()} has locked"]


def test_a_disk_that_runs_out_of_locks_is_named(tmp_path, monkeypatch):
    """NFS whose lock daemon does not run."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    refuse(monkeypatch, errno.ENOLCK)
    with pytest.raises(OSError, match="No locks available") as caught, state_lock("a.lock"):
        pass
    assert caught.value.filename == str(tmp_path / "a.lock")
    update_state("facts.json", lambda content: content.update(a=1))  # can be found out again


def test_a_home_that_is_read_only_is_read_without_locks(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    with read_only(tmp_path / "home"), state_lock("a.lock"), state_lock("a.lock"):
        update_state("facts.json", lambda content: content.update(a=1))


@without_locks
def test_an_output_file_has_one_writer(tmp_path, monkeypatch, capsys, code):
    monkeypatch.chdir(tmp_path)
    partial = tmp_path / "out.partial"
    (tmp_path / "in").write_text("{}\n")
    partial.write_text("a line\n")
    with held_elsewhere(partial, code) as process:
        refuse(monkeypatch, code)
        assert cli.main(["batch", "in", "--model", "opt-125m", "-o", "out"]) == 1
        assert f"{partial.name} is written by process {process.pid}" in capsys.readouterr().err
        process.kill()
    assert partial.read_text() == "a line\n" and not (tmp_path / "out").exists()


def test_a_file_that_was_renamed_is_another_ones(tmp_path):
    path = tmp_path / "a.partial"
    with sole_writer(path, "-o") as file:
        append(file, "one\n")
        path.rename(tmp_path / "a")
        with sole_writer(path, "-o") as second:  # which has begun a file of its own
            append(second, "two\n")
    assert (tmp_path / "a").read_text() == "one\n" and path.read_text() == "two\n"
    with sole_writer(path, "-o") as file:
        file.truncate(0)
    assert not path.exists()


def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys):
    with small_disk(tmp_path / "disk", 16384) as disk, sole_writer(disk / "out.partial", "-o") as file:
        with pytest.raises(OSError, match="No space left on device") as caught:
            append(file, "x" * 20_000)
        assert caught.value.filename == str(disk / "out.partial")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["--version"]) == 1
    assert capsys.readouterr().err == "flexgen-helm: stdout cannot be used: No space left on device\n"
