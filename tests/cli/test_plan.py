"""`flexgen-helm plan` as a process: JSON, tables, refusals, and no torch."""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flexgen_helm import Engine, cli
from flexgen_helm.engine import machine_profile
from flexgen_helm.errors import MemoryLimitError, UsageError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.request import GenerationRequest
from flexgen_helm.tiers import MemoryLimits
from tests.helpers.flags import options_of, record_suites
from tests.helpers.forks import python

LENGTHS = "--prompt-len 512 --gen-len 32"
ONE_TOKEN = "--prompt-len 512 --gen-len 1"
POLICY = "48x3,20,80,0,100,0,100"


def plan(words, **environment):
    """Run the command in a process that must not import torch."""
    code = (
        "import sys; from flexgen_helm.cli import main\n"
        "try:\n    code = main(['plan', *sys.argv[1:]])\n"
        "except SystemExit as end:\n    code = end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\nsys.exit(code)"
    )
    return subprocess.run(
        [*python("plan"), "-c", code, *words.split()], capture_output=True, text=True, timeout=120,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "120", **environment},
    )  # fmt: skip


def test_a_given_policy_is_evaluated():
    done = plan(f"--model opt-30b {LENGTHS} --hardware t4 --policy {POLICY} --json")
    assert json.loads(done.stdout)["policy"]["gpu_batch_size"] == 48
    done = plan(f"opt-175b {LENGTHS} --hardware t4 --policy {POLICY} --json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and not found["feasible"] and found["missing_bytes"]["gpu"] > 1e9


def test_the_table_says_what_lives_where_and_why():
    done = plan(f"--model opt-30b {LENGTHS} --hardware a100 --num-seqs 500")
    assert done.returncode == 0, done.stderr
    for words in ("KV cache", "generated tokens/s", " sequences/h: ", "Bound by the "):
        assert words in done.stdout
    assert (
        "schedule zigzag" in done.stdout
        and "Prompts that begin alike are not counted here" in done.stdout
    )
    assert "When it is interrupted: a stop costs at most" in done.stdout
    assert "opt-30b on a100: 500 prompts of 512 tokens, 32 generated tokens each" in done.stdout


def in_seconds(told):
    number, unit = told.split()
    return float(number) * {"s": 1, "min": 60, "h": 3600, "days": 86400}[unit]


def test_the_first_line_is_the_time_in_all_precisions():
    few = f"--model opt-30b {LENGTHS} --hardware t4"
    found = json.loads(plan(f"{few} --num-seqs 2000 --json").stdout)
    first = plan(f"{few} --num-seqs 2000").stdout.splitlines()[0]
    time = r"([\d.]+ [a-z]+)"
    words = (
        rf"About {time} \({time} to {time}\) for 2,000 prompts in fp16; 8bit: {time}, 4bit: "
        rf"{time}\."
    )
    told = [in_seconds(text) for text in re.fullmatch(words, first).groups()]
    seconds = [found["precisions"][name]["latency_s"] for name in ("fp16", "8bit", "4bit")]
    seconds[1:1] = found["range"]["latency_s"]
    assert told == pytest.approx(seconds, rel=0.15) and told[1] < told[0] < told[2]
    # Blocks of other precisions have other sizes, so their times are no comparison.
    assert re.fullmatch(rf"About {time} \({time} to {time}\) for a block of \d+ sequences in fp16\.",
                        plan(few).stdout.splitlines()[0])  # fmt: skip
    given = plan(f"--model opt-175b {LENGTHS} --hardware t4 --policy {POLICY}").stdout.splitlines()
    assert re.fullmatch(r"Does not fit: needs \d+ GiB in memory, t4 has 174 GiB\.", given[0])
    assert not any("Bound by" in line for line in given)


def test_the_first_line_is_bold_on_a_terminal_alone():
    words = f"--model opt-125m {LENGTHS} --hardware t4"
    assert plan(words, FORCE_COLOR="1", TERM="xterm").stdout.startswith("\x1b[1mAbout ")
    assert "\x1b" not in plan(words).stdout


def test_one_plan_compares_precisions_with_a_range():
    few = f"--model opt-30b {LENGTHS} --num-seqs 50 --hardware t4"
    one = json.loads(plan(f"{few} --json").stdout)
    assert list(one["precisions"]) == ["fp16", "8bit", "4bit"]
    for name, predicted in one["precisions"].items():
        alone = json.loads(plan(f"{few} --precision {name} --json").stdout)
        assert predicted == alone["predicted"] and alone["precisions"] == {}
    low, high = one["range"]["latency_s"]
    assert low < one["predicted"]["latency_s"] < high and "fitted" in one["range"]["source"]
    # What the range says of a time, it says of the rate.
    assert one["range"]["tokens_per_s"] == pytest.approx([50 * 32 / high, 50 * 32 / low])


def test_the_table_of_precisions_has_a_row_without_a_plan():
    """A single sequence of 8 bits takes longer than 4.67 s, because of its head; of 16 and of 4
    bits it does not.
    """
    shown = plan(f"--model opt-6.7b {LENGTHS} --hardware t4 --max-latency 4.67").stdout
    assert (
        " (2.37 s to 3.7 s) for a block of " in shown
        and "\nThe range: rates fitted to the paper's T4" in shown
    )
    rows = [line for line in shown.splitlines() if line.startswith(("8bit ", "4bit "))]
    assert len(rows) == 2 and "no plan" in rows[0] and rows[1].endswith("3.73 s to 5.83 s")
    asked = plan(f"--model opt-125m {LENGTHS} --hardware t4 --precision 8bit").stdout
    assert "\nThe range: " in asked and "4bit" not in asked


@pytest.mark.parametrize("policy", ["32x8,0,50,0,0,0,100", "8x1,0,50,0,0,0,100"])
def test_the_part_that_bounds_a_plan_is_named_with_what_it_would_save(tmp_path, policy):
    """As much as is predicted for a machine whose disk has twice the rates."""
    t4 = load_profile("t4")
    disk = replace(
        t4.disk, read_bytes_s=t4.disk.read_bytes_s * 2, write_bytes_s=t4.disk.write_bytes_s * 2
    )
    fast = tmp_path / "fast.json"
    fast.write_text(json.dumps(replace(t4, disk=disk).to_json()))
    few = f"--model opt-175b --policy {policy} {LENGTHS} --json"
    usual, faster = (
        json.loads(plan(f"{few} --hardware {machine}").stdout) for machine in ("t4", str(fast))
    )
    saved = 1 - faster["predicted"]["latency_s"] / usual["predicted"]["latency_s"]
    words = "halves the time" if saved > 0.45 else f"saves {100 * saved:.0f} % of the time"
    assert saved > 0.3 and usual["why"] == f"Bound by the disk: twice as fast {words}."


def test_room_is_what_the_disk_has_now(monkeypatch, capsys, tmp_path):
    """Of the folder that --offload-dir names, however full its disk was when the machine was
    measured.
    """
    laptop = load_profile("laptop")
    kept = replace(laptop, name="measured", disk=replace(laptop.disk, bytes=1))
    asked = []

    def measured(*, folder):
        asked.append(folder)
        return kept

    monkeypatch.setattr(machine_profile, "measured_profile", measured)
    free = 10 << 40
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(total=free, used=0, free=free)
    )
    folder = tmp_path / "not" / "yet"
    assert cli.main(f"plan --model opt-30b {LENGTHS} --offload-dir {folder} --json".split()) == 0
    assert asked == [folder]
    assert json.loads(capsys.readouterr().out)["memory"]["disk"]["limit"] == free - (1 << 30)


@pytest.mark.parametrize("precision, fits", [("fp16", True), ("8bit", False)])
def test_weights_that_the_disk_has_already_need_no_more_room(
    monkeypatch, capsys, tiny, tmp_path, precision, fits
):
    """As in a run: 16 bits are read from the checkpoint's own files, 8 bits are written."""
    kept = replace(load_profile("laptop"), name="measured")
    monkeypatch.setattr(machine_profile, "measured_profile", lambda *, folder: kept)
    path = tiny("llama").path
    policy = "3x2,0,0,0,100,0,100"
    words = (
        f"plan --model {path} --prompt-len 8 --gen-len 4 --disk 4KB --policy {policy} "
        f"--offload-dir {tmp_path} --device cpu --json "
    )
    assert cli.main(f"{words} --precision {precision}".split()) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["feasible"] == fits
    assert ("of these weights already, which need no more room" in err) == fits
    assert cli.main(f"{words} --dummy-weights".split()) == 0
    assert not json.loads(capsys.readouterr().out)["feasible"], "random weights are in no file"
    options = {"policy": policy, "offload_dir": tmp_path, "precision": precision}
    if fits:
        Engine.from_pretrained(path, limits=MemoryLimits(disk=4096), **options).close()
    else:
        with pytest.raises(MemoryLimitError, match="disk"):
            Engine.from_pretrained(path, limits=MemoryLimits(disk=4096), **options)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            "--model opt-30b",
            "plan needs --model with --prompt-len and --gen-len or with -c FILE",
        ),
        ("--model opt-30b --prompt-len 512 --gen-len 0", "--gen-len 0"),
        (f"opt-30b --model opt-13b {LENGTHS}", "two models are named"),
        ("--model opt-30b --prompt-len 2047 --gen-len 3", "2048 positions"),
        (f"--model opt-31b {LENGTHS}", "opt-30b"),
        (f"--model opt-30b {LENGTHS} --hardware t5", "t4"),
        (f"--model opt-30b {LENGTHS} --cpu-memory -5", "is no size"),
        (f"--model opt-30b {LENGTHS} --gpu-memory 1MB", "raise --gpu-memory"),
        (
            f"--model opt-30b {LENGTHS} --precision fp16,4bit",
            "take one of fp16, fp16-s, 8bit, 4bit-weights",
        ),
        (
            f"--model opt-30b {LENGTHS} --hardware no-gpu --device cuda",
            "take --device cpu",
        ),
        (f"--model opt-30b {LENGTHS} --schedule prefill-only", "take --schedule zigzag"),
        (f"--model opt-30b {ONE_TOKEN} --schedule row", "leave --schedule out"),
        (f"--model opt-30b {LENGTHS} --offload-dir /tmp", "leave one of them out"),
        (
            "-r mmlu:subject=anatomy --model opt-30b --gen-len 0",
            "have their own lengths",
        ),
    ],
)
def test_bad_input_gets_a_sentence_and_exit_code_2(arguments, words, tmp_path, capsys):
    if "no-gpu" in arguments:
        machine = tmp_path / "machine.json"
        machine.write_text(
            json.dumps(replace(load_profile("laptop"), gpu=None, link=None).to_json())
        )
        arguments = arguments.replace("no-gpu", str(machine))
    hardware = "" if "--hardware" in arguments else "--hardware t4"
    assert cli.main(f"plan {arguments} {hardware}".split()) == 2
    out, err = capsys.readouterr()
    assert words in err and "Traceback" not in err and "unexpected" not in err and not out


@pytest.mark.parametrize(
    "flags, arguments",
    [
        ("--precision foo", {"precision": "foo"}),
        ("--device sim", {"device": "sim"}),
        ("--link 3,3", {"link_gb_s": (3.0, 3.0)}),
        (f"--max-latency 9 --policy {POLICY}", {"max_latency": 9.0, "policy": POLICY}),
        ("--policy 48x3", {"policy": "48x3"}),
    ],
)
def test_plan_refuses_what_the_engine_refuses_in_its_words(flags, arguments, capsys):
    with pytest.raises(UsageError) as refused:
        Engine.from_pretrained("opt-30b", weights="dummy", **arguments)
    assert cli.main(f"plan --model opt-30b {LENGTHS} --hardware t4 {flags}".split()) == 2
    assert capsys.readouterr().err == f"flexgen-helm: {refused.value}\n"


def options_passed(command, monkeypatch):
    """The options that HELM's side gets if the words are typed."""
    calls = record_suites(monkeypatch)
    assert command[0] == "flexgen-helm" and cli.main(command[1:]) == 0
    return calls[0][1]


@pytest.mark.parametrize(
    "flags, limits",
    [
        (
            "--precision 4bit --gpu-memory 9GB --no-overlap",
            MemoryLimits(gpu=9 * 10**9),
        ),
        pytest.param("--max-latency 400 --no-cpu-attention", None, marks=pytest.mark.slow),
    ],
)
def test_the_command_that_is_printed_runs_the_plan(flags, limits, monkeypatch):
    arguments = f"--model flexgen/opt-30b {LENGTHS} --hardware t4 {flags}"
    shown = plan(arguments).stdout
    planned = json.loads(plan(f"{arguments} --json").stdout)
    command = shlex.split(shown[shown.index("  flexgen-helm run") :].replace("\\\n", " "))
    assert command == shlex.split(planned["command"])
    options = options_passed(command, monkeypatch)
    policy = options["policy"]
    assert str(policy) == planned["policy_flag"]
    assert (
        options["precision"] == planned["policy"]["precision"] and options["schedule"] == "zigzag"
    )
    for name, share in policy.fractions.items():
        assert share == pytest.approx(planned["policy"][name], abs=1e-6)
    assert options.get("limits") == limits and "max_latency" not in options
    if limits is not None and limits.gpu is not None:
        used = planned["memory"]["gpu"]
        assert used["peak"] + used["workspace"] <= limits.gpu, (
            "computing is within the limit, as in an engine"
        )
    assert ("overlap" in options) == ("--no-overlap" in flags)
    assert ("cpu_attention" in options) == ("--no-cpu-attention" in flags)


def test_no_command_is_printed_for_what_cannot_run():
    for flags in ("--stages 4", f"--policy {POLICY}"):
        shown = plan(f"--model opt-175b {LENGTHS} --hardware t4 {flags}").stdout
        assert "flexgen-helm run" not in shown


@pytest.mark.parametrize("gen_len", [6, 1])
def test_the_engine_places_what_the_plan_shows(tiny, tmp_path, gen_len):
    """The printed command is run: 19 MB of weights and a cache of up to 22 MB, of which host memory
    holds a part.
    """
    content = json.loads((tiny("llama").path / "config.json").read_text())
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12, "head_dim": 32}
    content |= {**sizes, "num_attention_heads": 8, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(content))
    workload = f"--prompt-len 24 --gen-len {gen_len} --num-seqs 60 --hardware laptop"
    limits = "--device cpu --cpu-memory 8MiB --disk 60MiB --dummy-weights"
    planned = json.loads(plan(f"--model {tmp_path} {workload} {limits} --json").stdout)
    assert planned["feasible"] and any(shares["disk"] for shares in planned["placement"].values())
    command = f"flexgen-helm batch IN.jsonl -o OUT.jsonl --model {tmp_path} "
    assert planned["command"].startswith(command)
    flags = shlex.split(planned["command"].removeprefix(command))
    requests = [
        GenerationRequest(
            prompt_token_ids=[number + 3, *range(3, 26)], max_tokens=gen_len, ignore_eos=True
        )
        for number in range(60)
    ]
    with Engine.from_pretrained(
        tmp_path, **options_of(*flags, "--offload-dir", str(tmp_path / "offload"))
    ) as engine:
        results = engine.run(requests)
        placed = engine.last_run["achieved_placement"]
    assert all(result.error is None for result in results)
    assert placed["weights"] == pytest.approx(planned["placement"]["weights"], abs=1e-3)
    if gen_len > 1:  # scoring keeps no cache
        assert placed["cache"] == pytest.approx(planned["placement"]["cache"], abs=0.05)
