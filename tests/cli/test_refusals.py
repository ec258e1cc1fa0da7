"""What needs no data and no model to be refused is refused before torch and HELM are imported."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flexgen_helm import cli
from flexgen_helm.cli.console import say
from flexgen_helm.cli.engine_flags import check_engine_flags, warn_of_limits_beyond
from flexgen_helm.cli.plan_problem import PlanOptions, problem_for
from flexgen_helm.errors import UsageError
from flexgen_helm.files import require_writable
from flexgen_helm.hardware import cuda_presence
from flexgen_helm.tiers import MemoryLimits
from tests.helpers.console_script import HEAVY, Finished, run_script

RUN = "run -r x -m 1"
RUN_OPT = "run -r simple_mcqa:model=flexgen/opt-125m -m 1 --device cpu"
DIVERGENCE = "divergence opt-125m --window 9 --text"
TOO_LONG = "s is too long for the name of a file; give a shorter one"
BATCH = "batch -o out --model opt-125m --dummy-weights"


@pytest.mark.fast(6)
@pytest.mark.parametrize(
    "arguments, says",
    [
        (
            "run -m 10 -r",
            "run needs -r, one or more run entries, or -c, a file with them, for example -r",
        ),
        (
            "run -c runs.conf",
            "run needs -m, the largest number of instances per scenario, for example -m 100",
        ),
        (
            "run -r x -m ten",
            "argument -m/--max-eval-instances: invalid int value: 'ten'",
        ),
        (f"{RUN} --dry-run=yes", "argument -d/--dry-run: ignored explicit argument 'yes'"),
        (
            f"{RUN_OPT} --max-latancy=5",
            "run has no flag --max-latancy=5; did you mean --max-latency",
        ),
        (f"{RUN_OPT} --suites=s", "run has no flag --suites=s; did you mean --suite"),
        (f"{RUN} --policy 10", "--policy '10' is not of the form GBSxNB,wg,wc,cg,cc,hg,hc"),
        (f"{RUN} --precision fp16,3bit", "precision '3bit' is not available"),
        (f"{RUN} --cpu-memory 8", "the limit of the cpu tier, '8', has no unit; write 8GiB"),
        (
            f"{RUN_OPT} --cpu-memory 1MiB --precision fp16,4bit",
            "opt-125m runs with 11 MiB",
        ),
        (
            f"{RUN} --max-latency 9 --policy 1x1,0,100,0,100,0,100",
            "leave it or the policy out",
        ),
        (
            f"{BATCH} /dev/null --offload-dir /proc/x",
            "--offload-dir /proc/x cannot be written: ",
        ),
        (f"{BATCH} absent.jsonl", "IN.jsonl absent.jsonl cannot be read: No such file"),
        (f"{DIVERGENCE} absent --precision fp16", "--text absent cannot be read"),
        (f"{DIVERGENCE} absent --baseline fp15", "precision 'fp15' is not available"),
        (
            "divergence opt-125m-4bit --window 9 --text absent",
            "opt-125m-4bit already means 4bit",
        ),
        (
            "divergence opt-125m --suite s --max-windows 2",
            "--suite and --max-windows exclude",
        ),
        (
            "divergence opt-125m --text absent",
            "divergence needs a text and its --window, or a --suite",
        ),
        (
            "plan --model opt-30b --prompt-len 9 --gen-len 9 --offload-dir /proc/x",
            "/proc/x",
        ),
        (f"{RUN_OPT} --suite {'s' * 256}", TOO_LONG),
        (f"report --suite {'s' * 256}", "there is no suite in benchmark_output/runs/ss"),
        (f"plan --model {'s' * 256} --prompt-len 9 --gen-len 9", TOO_LONG),
    ],
)
def test_it_is_one_sentence_and_nothing_heavy_is_imported(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout may have HELM's folders, or not
    refused = run_script(*arguments.split())
    assert refused.code == 2 and not refused.out and not refused.heavy
    lines = refused.err.splitlines()
    assert len(lines) == 1 and says in lines[0], refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        "models",
        "models --json",
        "entries",
        "--help",
        "plan --help",
        "--version",
        "absent",
    ],
)
def test_a_reader_that_has_read_enough_is_no_error(arguments):
    is_refused = arguments == "absent"
    with subprocess.Popen(
        [sys.executable, "-m", "flexgen_helm", *arguments.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if is_refused else subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert is_refused or b"Error" not in process.stderr.read()
        assert process.wait(60) == (2 if is_refused else 0)


def test_a_locale_in_which_helm_cannot_read_its_files_is_refused():
    refused = run_script(
        *RUN_OPT.split(), "--dummy-weights", LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
    )
    assert (
        refused.code == 2
        and not refused.heavy
        and refused.err.endswith("this locale's; set PYTHONUTF8=1\n")
    )


@pytest.mark.skipif(
    cuda_presence.why_no_cuda() is None, reason="this machine may have a CUDA device"
)
def test_a_gpu_that_is_not_there():
    refused = run_script(*f"{RUN} --device cuda:0".split())
    assert refused.code == 2 and not refused.heavy
    reason = cuda_presence.why_no_cuda()
    assert (
        refused.err
        == f"flexgen-helm: device 'cuda:0' was asked for and {reason}; take --device cpu\n"
    )


def test_a_limit_of_what_is_not_there_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr("flexgen_helm.cli.engine_flags.why_no_cuda", lambda: "there is none")
    limits = MemoryLimits(gpu=8 << 30, cpu=1 << 50)
    for machine, device in (("this machine", "cpu"), ("this machine", "auto"), ("laptop", None)):
        if device is None:
            words = (
                "plan --model opt-125m --prompt-len 9 --gen-len 9 --hardware laptop "
                "--policy 1x1,0,100,0,100,0,100 --gpu-memory 8GiB --cpu-memory 1048576GiB"
            )
            cli.main(words.split())
            asked = PlanOptions({"limits": limits}, "opt-125m", "laptop", 1, False)
            # of 2,048 positions: the last token needs none
            assert problem_for(asked, 2047, 2).limits["gpu"] == 0
        else:
            check_engine_flags({"limits": limits, "device": device})
        gpu, cpu = capsys.readouterr().err.splitlines()[:2]
        assert gpu == f"--gpu-memory has no effect: no GPU of {machine} computes"
        assert re.fullmatch(
            rf"--cpu-memory 1,048,576 GiB is beyond the [\d.]+ GiB that {machine} has; lower it",
            cpu,
        )
    capsys.readouterr()
    warn_of_limits_beyond(limits, 4 << 30, 1 << 50, "t4")
    assert (
        capsys.readouterr().err == "--gpu-memory 8 GiB is beyond the 4 GiB that t4 has; lower it\n"
    )
    check_engine_flags({"limits": MemoryLimits(gpu=8, cpu=1 << 20), "device": "sim"})
    assert not capsys.readouterr().err


def test_a_message_cannot_control_the_terminal(capsys):
    """Names in a stranger's file may; they are shown."""
    say("tensor \x1b]0;title\x07\x1b[2J of é☃\n\tnext line")
    assert capsys.readouterr().err == "tensor \ufffd]0;title\ufffd\ufffd[2J of é☃\n\tnext line\n"


def test_the_guard_sees_heavy_imports():
    assert Finished(0, "", "", frozenset({"torch", "typer"})).heavy == {"torch"} <= HEAVY


@pytest.fixture
def torch_build(tmp_path, monkeypatch):
    """Write the version file of another torch, and take the driver's library away."""

    def no_library(name):
        raise OSError(name)

    def write(text):
        (tmp_path / "version.py").write_text(text)
        found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(cuda_presence, "find_spec", lambda name: found)
        monkeypatch.setattr(ctypes, "CDLL", no_library)
        return tmp_path

    return write


CPU_BUILD = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA_BUILD = "cuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n"


def test_only_what_is_certain_is_refused(torch_build, monkeypatch):
    assert cuda_presence.why_no_cuda(torch_build(CPU_BUILD)) == "this torch is built for CPUs only"
    assert cuda_presence.why_no_cuda(torch_build("cuda = None\nhip = None\n")) is not None
    assert cuda_presence.why_no_cuda(torch_build(CUDA_BUILD)) == "this machine has no NVIDIA driver"
    assert cuda_presence.why_no_cuda(torch_build("cuda = None\nhip = '6.4'\n")) is None  # ROCm
    assert cuda_presence.why_no_cuda(torch_build("version = 3\n")) is None  # another version's file
    monkeypatch.setattr(cuda_presence, "find_spec", lambda name: None)
    assert cuda_presence.why_no_cuda() is None


@pytest.mark.parametrize("file", ["nvidia0", "dxg"])
def test_a_device_file_leaves_the_question_to_torch(torch_build, file):
    devices = torch_build(CUDA_BUILD)
    (devices / file).touch()
    assert cuda_presence.why_no_cuda(devices) is None


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(tmp_path):
    require_writable(tmp_path / "not" / "yet", "--offload-dir")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            UsageError,
            match=(rf"--offload-dir {path} cannot be written: {tmp_path / 'file'} is a file"),
        ):
            require_writable(path, "--offload-dir")
