"""`flexgen-helm models` and `entries`: what they list, and what they need for it."""

import json
import os
import subprocess
import sys

import pytest

from flexgen_helm import cli
from flexgen_helm.checkpoint.catalog import CATALOG, WHEEL_MODEL
from flexgen_helm.checkpoint.fetch import GGUF_NAME, GGUF_SIZE
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.cli import models as models_command
from flexgen_helm.cli.models import MachineLimits
from flexgen_helm.errors import UsageError
from tests.helpers.paths import ROOT

GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_is_here(tmp_path, monkeypatch):
    """A home without models, no data, no names of the user."""
    for name in ("FLEXGEN_HELM_MODELS", "FLEXGEN_HELM_DATA", "COLUMNS", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.chdir(tmp_path)


def listed(capsys, *arguments):
    capsys.readouterr()
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def rows(capsys, *arguments):
    return {row["name"]: row for row in listed(capsys, "models", *arguments)["models"]}


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    "arguments", [["models", "opt"], ["entries"], ["models", "qwen", "--json"]]
)
def test_they_need_neither_heavy_imports_nor_the_network(arguments):
    code = (
        "import socket, sys\n"
        "def refuse(*arguments, **named): raise OSError('the network was used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        f"from flexgen_helm.cli import main\ncode = main({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'helm', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert not [
        line for line in done.stderr.splitlines() if not line.endswith("working")
    ]  # after 10 s on a busy machine
    if "--json" not in arguments:
        assert max(map(len, done.stdout.splitlines())) <= 100
        # The last line is a command, whose run entry is one that HELM can run.
        command = done.stdout.splitlines()[-1].split()
        assert command[:3] == ["flexgen-helm", "run", "-r"] and "model=flexgen/" in command[3]


def test_the_whole_catalog_is_listed(capsys):
    found = rows(capsys)
    assert set(found) == set(CATALOG) and list(found)[0] == WHEEL_MODEL
    opt = found["opt-6.7b"]
    assert (opt["parameters"], opt["architecture"], opt["hub_repo"]) == (
        6_658_473_984,
        "opt",
        "facebook/opt-6.7b",
    )
    assert (
        opt["bytes"]["fp16"] == 2 * 6_658_473_984
        and opt["bytes"]["4bit"] < 0.32 * opt["bytes"]["fp16"]
    )
    assert not any(row["is_here"] for row in found.values())


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("LLAMA-3.3", {"llama-3.3-70b-instruct"}),
        ("gpt_oss", {"gpt-oss-20b", "gpt-oss-120b"}),
        ("facebook/galactica-6.7b", {"galactica-6.7b"}),
        ("phi-?", {"phi-4"}),
        ("gpt2-*l*", {"gpt2-large", "gpt2-xl"}),
    ],
)
def test_a_pattern_is_looked_for_in_three_columns(capsys, pattern, expected):
    assert set(rows(capsys, pattern)) == expected


def test_no_match_is_one_sentence_with_the_closest_names(
    capsys,
):
    assert cli.main(["models", "opt6.7b"]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and captured.err.count("\n") == 1
        and "did you mean opt-6.7b?" in captured.err
    )
    assert cli.main(["models", "zzzz"]) == 2
    assert "`flexgen-helm models` lists all names" in capsys.readouterr().err


def test_what_is_on_this_machine(
    capsys,
    tmp_path,
    tiny,
    monkeypatch,
):
    embedded = tmp_path / "home" / "models" / WHEEL_MODEL / GGUF_NAME
    embedded.parent.mkdir(parents=True)
    with embedded.open("wb") as file:
        file.truncate(GGUF_SIZE)
    cache, commit = tmp_path / "hf" / "hub", "a" * 40
    whole = cache / "models--facebook--opt-125m" / "snapshots" / commit
    whole.mkdir(parents=True)
    (whole / "config.json").write_text("{}")
    (whole / "model.safetensors").write_bytes(b"")
    partial = cache / "models--facebook--opt-350m" / "snapshots" / commit
    partial.mkdir(parents=True)
    (partial / "config.json").write_text("{}")
    converted = tmp_path / "home" / "converted" / "facebook--opt-1.3b" / commit
    converted.mkdir(parents=True)
    (converted / "flexgen_conversion.json").write_text("{}")
    (tmp_path / "models.yaml").write_text(
        f"mine: {tiny('qwen3').path}\nlost: nowhere\nalias: opt-125m\n"
    )
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", "models.yaml")
    monkeypatch.setattr("flexgen_helm.planner.fit.fit", lambda *_: "in memory")
    found = rows(capsys)
    assert list(found)[:4] == ["mine", "lost", "alias", WHEEL_MODEL]
    here = {name for name, row in found.items() if row["is_here"]}
    assert here == {"mine", "alias", WHEEL_MODEL, "opt-125m", "opt-1.3b"}
    assert found["lost"]["is_here"] is None and found["lost"]["bytes"] == {}
    parameters = sum(parameter.numel() for parameter in tiny("qwen3").reference.parameters())
    assert read_model_config("facebook/opt-125m") == read_model_config("opt-125m")
    (whole.parents[2] / "models--org--own" / "snapshots").mkdir(parents=True)
    (whole.parents[2] / "models--org--own" / "snapshots" / commit).symlink_to(tiny("qwen3").path)
    for name in ("org/own", "flexgen/org--own-4bit"):  # in no catalog, and fetched before
        assert read_model_config(name) == read_model_config("mine")
    with pytest.raises(UsageError, match="run: flexgen-helm fetch org/other$"):
        read_model_config("org/other")
    assert (found["mine"]["architecture"], found["mine"]["parameters"]) == ("qwen3", parameters)
    embedded.write_bytes(b"half")
    assert not rows(capsys, WHEEL_MODEL)[WHEEL_MODEL]["is_here"]


def test_what_fits_is_said_in_words(capsys, monkeypatch):
    machine = MachineLimits(
        {"gpu": 14 * GIB, "cpu": 20 * GIB, "disk": 60 * GIB}, "the GPU has 14 GiB"
    )
    monkeypatch.setattr(models_command, "this_machine", lambda: machine)
    found = rows(capsys, "opt-")
    assert {
        name: found[name]["fits"]["fp16"] for name in ("opt-6.7b", "opt-13b", "opt-30b", "opt-175b")
    } == {
        "opt-6.7b": "in GPU memory",
        "opt-13b": "offloaded to disk",
        "opt-30b": "too large for the disk",  # with its download
        "opt-175b": "too large for the disk",
    }
    assert found["opt-13b"]["fits"]["4bit"] == "in GPU memory"
    assert cli.main(["models", "opt-13b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("opt-13b")]
    assert line.split() == ["opt-13b", "13B", "opt", "23.9", "GiB", "disk", "7.1", "GiB", "GPU"]
    assert "The GPU has 14 GiB" in " ".join(lines)


def test_a_gpu_counts_if_the_saved_profile_knows_it(monkeypatch, tmp_path):
    from flexgen_helm.engine.machine_profile import SavedProfile, save
    from flexgen_helm.hardware.profile import load_profile
    from flexgen_helm.paths import state_dir

    assert models_command.this_machine().limits["gpu"] == 0
    profile = load_profile("t4")
    assert profile.gpu is not None
    save(SavedProfile(profile, 0.0), state_dir() / "offload")
    counted = models_command.this_machine()
    assert 0.85 * profile.gpu.memory_bytes < counted.limits["gpu"] < profile.gpu.memory_bytes
