"""`flexgen-helm clean`: what is listed, and that only what is named and unused goes."""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from flexgen_helm import cli
from flexgen_helm.locks import sole_writer
from flexgen_helm.offload.offload_directory import OffloadDirectory
from flexgen_helm.request import GenerationResult
from flexgen_helm.response_cache import ResponseCache, response_cache_path

ANSWERS, WEIGHTS = "journal/old.sqlite", "offload/weights-0123-float16"
CONVERSION, DEAD = "converted/local/m-0123", "offload/run-1-0"
REST, HALF_REMOVED = "converted/org--repo/.0123.partial", "models/.m.removed"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with one of each kind, and with what is not to be listed."""
    home = tmp_path / "home"
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(home))
    cache = ResponseCache(response_cache_path(home, "old"), "flexgen/tiny-4bit")
    cache.put_many({"k": GenerationResult()})
    cache.close()
    for name, size in (
        (WEIGHTS, 90_000),
        (CONVERSION, 50_000),
        (DEAD, 9_000),
        (REST, 5_000),
        (HALF_REMOVED, 4_500),
        ("models/tiny", 400),
    ):
        (home / name).mkdir(parents=True)
        (home / name / "file").write_bytes(bytes(size))
    (home / "hashes.json").write_text("{}")
    (home / "models/tiny.lock").touch()
    (home / "logs").mkdir()
    (home / "logs" / "run.log").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (home / "converted" / "local" / "link").symlink_to(tmp_path / "elsewhere")
    return home


def clean(capsys, *arguments, expect=0):
    assert cli.main(["clean", *arguments, "--json"]) == expect
    return {item["name"]: item for item in json.loads(capsys.readouterr().out)["items"]}


def files(home):
    return {
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def test_everything_that_can_be_made_again_is_listed_and_nothing_else(home, capsys):
    before = files(home)
    items = clean(capsys)
    assert set(items) == {WEIGHTS, CONVERSION, ANSWERS, DEAD, REST, HALF_REMOVED, "models/tiny"}
    assert list(items)[0] == WEIGHTS and items[WEIGHTS]["num_bytes"] >= 90_000
    assert not any(item["is_in_use"] or item["is_removed"] for item in items.values())
    assert files(home) == before
    assert cli.main(["clean"]) == 0
    said = capsys.readouterr()
    assert WEIGHTS in said.out and "today" in said.out and "7 items" in said.err


def test_only_what_is_named_goes_and_only_with_yes(home, capsys):
    before = files(home)
    assert set(clean(capsys, "offload/*")) == {WEIGHTS, DEAD}
    assert files(home) == before
    items = clean(capsys, "offload/*", "--yes")
    assert all(item["is_removed"] for item in items.values())
    assert before - files(home) == {f"{WEIGHTS}/file", f"{DEAD}/file"}
    clean(capsys, ANSWERS, REST, "--yes")
    assert before - files(home) == {f"{WEIGHTS}/file", f"{DEAD}/file", f"{REST}/file", ANSWERS}
    assert (home.parent / "elsewhere").is_dir() and (home / "hashes.json").is_file()


def test_wrong_usage_removes_nothing(home, capsys):
    before = files(home)
    assert cli.main(["clean", "--yes"]) == 2
    assert "name it" in capsys.readouterr().err
    assert cli.main(["clean", "journal/new.sqlite", "--yes"]) == 2
    assert "nothing is stored under the name journal/new.sqlite" in capsys.readouterr().err
    assert cli.main(["clean", "../elsewhere", "--yes"]) == 2
    assert files(home) == before


def test_age_is_that_of_the_last_use(home, capsys):
    month_ago = time.time() - 30 * 86_400
    for name in (ANSWERS, f"{WEIGHTS}/file", f"{CONVERSION}/file"):
        os.utime(home / name, (month_ago, month_ago))
    os.utime(home / CONVERSION / "file", (time.time(), month_ago))  # read, not changed
    for _ in range(2):  # to list it is no use of it
        assert set(clean(capsys, "--older-than", "20")) == {ANSWERS, WEIGHTS}
    assert set(clean(capsys, "--older-than", "20", "--yes")) == {ANSWERS, WEIGHTS}
    assert not (home / ANSWERS).exists() and (home / CONVERSION / "file").exists()


# What a process uses


@contextmanager
def answers_are_open(home):
    """In another process that holds no lock: what it would write next would be lost."""
    code = (
        "import sqlite3, sys\nconnection = sqlite3.connect(sys.argv[1])\n"
        "connection.execute('SELECT * FROM answers')\nprint(1, flush=True)\ninput()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(home / ANSWERS)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield
    finally:
        process.communicate("\n")


@contextmanager
def an_engine_runs(home):
    directory = OffloadDirectory(home / "offload")
    try:
        yield
    finally:
        directory.close()


@contextmanager
def a_conversion_runs(home):
    with sole_writer(home / CONVERSION, "-o"):
        yield


USES = {answers_are_open: ANSWERS, an_engine_runs: WEIGHTS, a_conversion_runs: CONVERSION}


@pytest.mark.parametrize("use, name", USES.items(), ids=[use.__name__ for use in USES])
def test_what_a_process_uses_stays(home, capsys, use, name):
    with use(home):
        assert clean(capsys)[name]["is_in_use"]
        items = clean(capsys, name, "--yes", expect=1)
        assert (home / name).exists() and not items[name]["is_removed"]
    assert not clean(capsys)[name]["is_in_use"]
