"""`flexgen-helm divergence` on tiny models."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from flexgen_helm import Engine, cli
from flexgen_helm.cli.divergence import print_perplexity
from flexgen_helm.engine.compared_prompts import ComparedPrompts
from flexgen_helm.plugin import compared_prompts
from tests.helpers.suites import accuracies, write_run

TEXT = "the quick brown fox jumps over the lazy dog, and runs. " * 20


def command(model, tmp_path, *more, window=40):
    (tmp_path / "text").write_text(TEXT)
    return [
        "divergence",
        str(model.path),
        "--text",
        str(tmp_path / "text"),
        "--window",
        str(window),
        *more,
    ]


def test_precisions_against_fp16_on_one_text(tiny, tmp_path, capsys):
    model = tiny("llama")
    argv = command(model, tmp_path, "--precision", "8bit,fp16,4bit", "--json")
    assert cli.main(argv) == 0
    by_precision = {
        row["precision"]: row for row in json.loads(capsys.readouterr().out)["precisions"]
    }
    assert [*by_precision] == ["8bit", "4bit"]
    for precision, found in by_precision.items():
        plain = [*argv[:6], "--json", "--precision"]
        for name, key in (("fp16", "baseline_perplexity"), (precision, "perplexity")):
            assert cli.main([*plain, name, "--baseline", name]) == 0
            expected = json.loads(capsys.readouterr().out)
            assert found[key] == pytest.approx(expected["perplexity"], rel=1e-6)
            assert found["tokens"] == expected["tokens_scored"]
        assert (
            found["kl"]["tokens"] == found["tokens"] == found["logprob"]["tokens"]
            and found["layers"] is None
        )
        assert found["interval"][0] < found["ratio"] < found["interval"][1]
    assert 0 < by_precision["8bit"]["kl"]["mean"] < by_precision["4bit"]["kl"]["mean"] / 20
    assert by_precision["8bit"]["same_top"] > by_precision["4bit"]["same_top"]


def test_for_people_and_with_weights_from_the_disk(tiny, tmp_path, capsys):
    folder = tmp_path / "offloaded"
    argv = command(
        tiny("opt"),
        tmp_path,
        "--max-windows",
        "3",
        "--offload-dir",
        str(folder),
        "--policy",
        "2x1,0,0,0,100,0,100",
    )
    assert cli.main(argv) == 0
    first, perplexity, top, head, kl, change = capsys.readouterr().out.splitlines()
    assert first == "4bit against fp16: 117 tokens in 3 windows"
    assert perplexity.startswith("  perplexity ") and top.startswith("  same top token at ")
    assert head.split() == ["nats", "mean", "95", "%", "interval", "median", "99", "%", "largest"]
    assert kl.startswith("  KL divergence ") and change.startswith("  |log-probability| ")
    assert len(head) == len(kl) == len(change)
    assert all(
        path.name == ".lock" or path.name.startswith("weights-") for path in folder.iterdir()
    )


def test_a_run_entry_without_a_token_is_left_out_and_named(tiny, tmp_path, monkeypatch, capsys):
    model = tiny("llama")
    compared = {
        "answered": ComparedPrompts(
            [(5, 6, 7, 8), (9, 8, 7)], [range(2, 4), range(1, 3)], ["a", "b"]
        ),
        "silent": ComparedPrompts([], [], []),
    }
    monkeypatch.setattr(compared_prompts, "read_compared_prompts", lambda run: compared[run.entry])
    for entry in compared:
        write_run(
            tmp_path / "runs" / "s",
            entry,
            "fp16",
            {"exact_match": 0.5},
            accuracies([0, 1]),
            model="small",
        )
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.json"))
    (tmp_path / "models.json").write_text(json.dumps({"small": {"path": str(model.path)}}))
    argv = ["divergence", "small", "--suite", "s", "-o", str(tmp_path)]
    assert cli.main(argv) == 0
    shown = capsys.readouterr()
    assert "silent: no answer has a token to compare, so it is left out" in shown.err
    assert (
        shown.out.startswith("answered: 4bit against fp16: 4 tokens in 2 instances")
        and "silent" not in shown.out
    )
    assert cli.main(["divergence", "small", str(tiny("qwen2").path), *argv[2:]]) == 0
    assert (
        f"answered: {tiny('qwen2').path} against small: 4 tokens in 2 instances"
        in capsys.readouterr().out
    )
    compared["answered"] = compared["silent"]
    assert cli.main(argv) == 2 and "no answer of small in " in capsys.readouterr().err


def test_a_second_model_and_where_the_loss_arises(tiny, tmp_path, capsys):
    models = [tiny("llama"), tiny("qwen2")]
    argv = command(models[0], tmp_path)
    argv[2:2] = [str(models[1].path)]
    assert cli.main([*argv, "--by-layer", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["precisions"]
    assert (found["baseline"], found["precision"]) == tuple(str(model.path) for model in models)
    assert len(found["layers"]) == 4 and min(found["layers"]) > 0.1 and found["kl"]["mean"] > 0.1
    assert cli.main([*argv, "--by-layer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, name, error in zip(
        lines[-4:], ("embedding", "layer 1", "layer 2", "layer 3"), found["layers"]
    ):
        bar = "█" * round(20 * error / max(found["layers"]))
        assert line.split() == [*name.split(), f"{error:.6f}", bar]
    assert (
        cli.main(
            [*argv[:2], str(models[0].path), *argv[3:], "--precision", "8bit", "--baseline", "8bit"]
        )
        == 0
    )
    same = f"{models[0].path}-8bit"
    assert (
        f"{same} against {same}: " in (out := capsys.readouterr().out)
        and out.count("0.000000 … 0.000000") == 2
    )


def test_models_that_cannot_be_compared_are_refused_before_weights_are_read(
    tiny, tmp_path, monkeypatch, capsys
):
    argv = command(tiny("llama"), tmp_path)
    shutil.copytree(tiny("llama").path, folder := tmp_path / "second")
    content = json.loads((folder / "tokenizer.json").read_text())
    (old,) = (token for token, number in content["model"]["vocab"].items() if number == 77)
    content["model"]["vocab"]["zebra"] = content["model"]["vocab"].pop(old)
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert cli.main([*argv[:2], str(folder), *argv[2:]]) == 2
    assert (
        "token 77 is " in (said := capsys.readouterr().err) and "and 'zebra' in the second" in said
    )
    argv[2:2] = [str(tiny("gemma2").path)]
    assert cli.main([*argv, "--by-layer"]) == 2
    assert (
        "the models have 3 layers of 48 and 4 layers of 48; leave it out" in capsys.readouterr().err
    )
    for name, value in {
        "TORCHELASTIC_RUN_ID": "1",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cli.main(argv) == 2 and "start divergence without torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("window, max_windows", [(16, 2), (7, None), (96, None)])
def test_a_perplexity_equals_transformers(tiny, tmp_path, capsys, window, max_windows):
    model = tiny("llama")
    argv = command(model, tmp_path, "--precision", "fp16", "--json", window=window)
    assert cli.main(argv + (["--max-windows", str(max_windows)] if max_windows else [])) == 0
    found = json.loads(capsys.readouterr().out)
    with Engine.from_pretrained(model.path) as engine:
        ids = engine.tokenizer.encode(TEXT, add_special_tokens=False)
    scores = []
    for row in [ids[i : i + window] for i in range(0, len(ids), window)][:max_windows]:
        logprobs = model.logprobs(row)
        scores += [logprobs[i, row[i + 1]].item() for i in range(len(row) - 1)]
    assert found["tokens_scored"] == len(scores)
    assert found["nll"] == pytest.approx(-sum(scores), rel=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(scores) / len(scores)), rel=1e-4)


@pytest.mark.parametrize(
    "content, window, why",
    [(b"", 8, "fewer than 2"), (b"the fox", 97, "96"), (b"\xff", 8, "UTF-8")],
)
def test_a_text_that_cannot_be_scored_is_refused(tiny, tmp_path, capsys, content, window, why):
    argv = command(tiny("llama"), tmp_path, window=window)
    (tmp_path / "text").write_bytes(content)
    assert cli.main(argv) == 2
    assert why in capsys.readouterr().err


def test_a_perplexity_that_no_float_holds_is_infinite(capsys):
    print_perplexity(np.array([-1e4]), as_json=False)
    assert capsys.readouterr().out.startswith("perplexity inf over 1 token ")
    print_perplexity(np.array([-1e4, -2e4]), as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "tokens_scored": 2,
        "nll": 3e4,
        "perplexity": None,
    }
