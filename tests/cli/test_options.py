"""The command line without a model: help, flags, exit codes, what is imported when."""

from __future__ import annotations

import json
import os
from functools import cache
from inspect import cleandoc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm import __version__, cli
from flexgen_helm.cli.app import command_line
from flexgen_helm.cli.engine_flags import to_arguments
from flexgen_helm.config import parse_size
from flexgen_helm.errors import CheckpointError, Interrupted, RequestError, UsageError
from flexgen_helm.planner.policy import Policy
from flexgen_helm.tiers import MemoryLimits
from flexgen_helm.units import duration, size_argument, spelled_duration
from tests.helpers.console_script import run_script
from tests.helpers.flags import options_of, record_suites
from tests.helpers.small_disks import read_only


@pytest.mark.parametrize("command", ["", "divergence"])
def test_help_imports_nothing_heavy(command):
    shown = run_script(*command.split(), "--help")
    assert shown.code == 0 and not (shown.heavy | {"numpy"} & shown.imports), shown.err
    assert "Usage: flexgen-helm" in shown.out and "\x1b[" not in shown.out
    flags = ("--precision", "--policy", "--gpu-memory", "--no-cpu-attention", "--dummy-weights")
    assert not command or all(flag in shown.out for flag in flags)
    assert "kv-dtype" not in shown.out  # every value of it is refused


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flexgen-helm {__version__}\n"


@pytest.mark.parametrize(
    "text, size",
    [
        ("0", 0),
        ("8 gib", 8 << 30),
        ("8GB", 8 * 10**9),
        ("1.5MiB", 3 << 19),
        ("2kB", 2000),
        ("12345678901B", 12345678901),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


ALL_FLAGS = [
    "--precision",
    "4bit",
    "--policy",
    "1x1,0,100,0,100,0,100",
    "--schedule",
    "row",
    "--gpu-memory",
    "1GiB",
    "--disk",
    "5B",
    "--offload-dir",
    "x",
    "--device",
    "sim",
    "--link",
    "12,8.5",
    "--no-overlap",
    "--no-cpu-attention",
    "--dummy-weights",
    "7",
]


def test_flags_become_options():
    assert options_of() == {}
    assert options_of(*ALL_FLAGS, "--max-latency", "9") == {
        "precision": "4bit",
        "policy": Policy(1, 1),
        "schedule": "row",
        "limits": MemoryLimits(gpu=1 << 30, disk=5),
        "offload_dir": "x",
        "device": "sim",
        "link_gb_s": (12.0, 8.5),
        "overlap": False,
        "cpu_attention": False,
        "weights": "dummy",
        "seed": 7,
        "max_latency": 9.0,
    }
    assert options_of("--dummy-weights") == {"weights": "dummy", "seed": 0}
    assert options_of("--policy", "auto") == {"policy": "auto"}


@pytest.mark.parametrize(
    "flags", [ALL_FLAGS, ["--dummy-weights"], ["--max-latency", "9", "--gpu-memory", "1.5GB"], []]
)
def test_options_become_the_flags_that_stand_for_them(flags):
    options = options_of(*flags)
    assert options_of(*to_arguments(options)) == options


@given(st.integers(0, 1 << 60))
def test_a_size_as_flags_take_it_is_exact(num_bytes):
    assert parse_size(size_argument(num_bytes)) == num_bytes


def test_a_duration_has_two_units_that_people_can_picture():
    assert [duration(seconds) for seconds in (5, 65, 3_605, 90_000)] == [
        "0:05", "1:05", "1:00:05", "25:00:00",
    ]  # fmt: skip
    assert [spelled_duration(seconds) for seconds in (4.21, 559, 2_010_120)] == [
        "4.21 s",
        "9 min 19 s",
        "23 d 6 h",
    ]


@pytest.mark.parametrize(
    "text, why",
    [("1.5", "has no unit; write 1.5GiB or 1.5MiB$"), ("8589934592", "no unit; write 8589934592B$"), ("-1", "8GiB"),
     ("8 gigs", "8GiB"), ("nan", "8GiB")],
)  # fmt: skip
def test_what_is_no_size_says_how_to_write_one(text, why):
    with pytest.raises(ValueError, match=why):
        parse_size(text)
    assert parse_size(1000) == 1000  # Python's own numbers are bytes


@pytest.mark.parametrize("link", ["12", "a,b", "0,1", "nan,1"])
def test_a_bad_link_is_refused(link):
    with pytest.raises(UsageError, match="12,12"):
        options_of("--link", link)


@pytest.mark.parametrize(
    "argv",
    [
        "nonsense",
        "batch /dev/null",
        "batch /dev/null -o /dev/null --model no-such-model",
        "fetch no-such-model",
        "models --csv",
    ],
)
def test_wrong_usage_is_2_and_one_message_on_stderr(argv, capsys):
    assert cli.main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.strip()
    assert "Traceback" not in captured.err


def test_an_option_of_one_value_is_given_once(monkeypatch, capsys):
    """All options of all commands, but those that take several values and are joined."""
    calls, known = record_suites(monkeypatch), 0
    monkeypatch.setattr("flexgen_helm.cli.app.command_line", cache(command_line))
    for name, command in command_line().commands.items():
        for param in command.params:
            takes_one = not (
                param.param_type_name == "argument"
                or param.is_flag
                or param.multiple
                or param.count
            )
            if takes_one and not str(param.metavar).endswith("…"):
                option, known = max(param.opts, key=len), known + 1
                words = ["-r", "gsm:model=flexgen/opt-125m"] if name == "run" else []
                assert cli.main([name, option, "1", *words, f"{option}=2"]) == 2
                assert f"{option} is given twice" in capsys.readouterr().err
    assert known > 100 and not calls


def test_entries_given_twice_are_all_run(monkeypatch):
    from helm.benchmark.run import build_parser

    calls = record_suites(monkeypatch)
    entries = [
        f"{name}:model=flexgen/opt-125m" for name in ("simple_mcqa", "simple_mcqa_scored", "gsm")
    ]
    words = ["-r", entries[0], entries[1], "-m", "1", f"--run-entries={entries[2]}"]
    assert cli.main(["run", *words]) == 0
    ((passed, _),) = calls
    assert build_parser().parse_args([*passed, "--suite", "s"]).run_entries == entries
    assert cli.main(["run", *words, "-r", "no_such_scenario:model=flexgen/opt-125m"]) == 2, (
        "all are checked"
    )
    assert len(calls) == 1


def test_a_suite_has_one_writer(monkeypatch, tmp_path):
    """A second run while the first one computes; without a home that can be written, nobody is
    refused.
    """
    from flexgen_helm.plugin import suite

    home, words = (
        tmp_path / "home",
        ["run", "-r", "simple_mcqa:model=flexgen/opt-125m", "-m", "1", "--suite"],
    )
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    codes = {}

    def run_suite(*_):
        if not codes:
            codes["first"] = None
            codes.update({name: cli.main([*words, name]) for name in ("mine", "other")})
        return suite.SuiteOutcome(0)

    monkeypatch.setattr(suite, "run_suite", run_suite)
    assert cli.main([*words, "mine"]) == 0 and (codes["mine"], codes["other"]) == (1, 0)
    log = "".join(file.read_text() for file in (home / "logs").iterdir())
    assert (
        f"--suite: benchmark_output/runs/mine is written by process {os.getpid()}; wait until that "
        "has ended" in log
    )
    assert cli.main([*words, "mine"]) == 0
    with read_only(home):
        assert cli.main([*words, "mine"]) == 0


def test_folders_that_cannot_be_written_are_named_before_helm_is_imported(
    tmp_path, monkeypatch, capsys
):
    words = ["run", "-r", "simple_mcqa:model=flexgen/opt-125m", "-m", "1"]
    calls = record_suites(monkeypatch)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with read_only(tmp_path / "here"):
        os.chdir(tmp_path / "here")  # into what is mounted
        for more, named in (
            ([], "-o benchmark_output"),
            (["-o", str(tmp_path)], "--local-path prod_env"),
        ):
            assert cli.main([*words, *more]) == 2
            assert (
                f"{named} cannot be written: Read-only file system; name another folder"
                in capsys.readouterr().err
            )
        assert (
            cli.main([*words, "-o", str(tmp_path), "--local-path", str(tmp_path / "env")]) == 0
            and len(calls) == 1
        )
        os.chdir(tmp_path)


def test_arguments_of_lm_eval_are_given_once(capsys):
    assert cli.main(["lm-eval", "--tasks", "a", "--limit=5", "--tasks", "b", "--limit", "7"]) == 2
    assert "--limit is given twice" in capsys.readouterr().err


def fail_with(monkeypatch, error):
    """Have `fetch` raise `error`."""
    import flexgen_helm.checkpoint.fetch

    def fetch(*args, **kwargs):
        raise error

    monkeypatch.setattr(flexgen_helm.checkpoint.fetch, "fetch", fetch)


@pytest.mark.parametrize(
    "error, code",
    [
        (CheckpointError("the shard is gone"), 2),
        (RequestError("the shard is gone"), 1),
        (Interrupted("the shard is gone"), 130),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("the shard is gone"), 1),
    ],
)
def test_errors_become_a_sentence_and_an_exit_code(monkeypatch, capsys, error, code):
    fail_with(monkeypatch, error)
    monkeypatch.delenv("FLEXGEN_HELM_DEBUG", raising=False)
    assert cli.main(["fetch", "x"]) == code
    err = capsys.readouterr().err
    assert err.startswith("flexgen-helm: ") and err.count("\n") == 1
    assert isinstance(error, KeyboardInterrupt) or "the shard is gone" in err


def test_fetch_prints_the_path(monkeypatch, capsys, tmp_path):
    assert cli.main(["fetch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_what_was_measured_is_printed_even_where_it_cannot_be_written(
    monkeypatch, capsys, tmp_path
):
    from flexgen_helm.engine import machine_profile
    from flexgen_helm.hardware.profile import load_profile

    monkeypatch.setattr(
        machine_profile, "measured_profile", lambda **settings: load_profile("laptop")
    )
    assert cli.main(["profile", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert (
        captured.err
        == f"flexgen-helm: {tmp_path} cannot be written: Is a directory; name another with --out\n"
    )


def test_examples_can_be_copied_from_80_columns():
    lines = [
        line
        for command in command_line().commands.values()
        for line in cleandoc(command.help).splitlines()
    ]
    assert not [line for line in lines if line.startswith("  ") and len(line) > 77]
