"""`bench clients` without its measurements: the reference copy, HELM's entries, what is compared."""

from __future__ import annotations

import json

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.benchmarks import KNOWN, Options, clients, helm_runs, load, summary
from flexgen_helm.benchmarks.reference import export, same_tokens
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.core.errors import FlexgenError, UsageError
from flexgen_helm.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "variant", ["llama", "llama-untied-biases", "llama-wide-heads", "llama3-rope", "llama-linear-rope"]
)
def test_the_reference_copy_is_our_model(tiny, tmp_path, variant):
    from transformers import AutoModelForCausalLM

    model = tiny(variant)
    export(open_checkpoint(model.path), tmp_path)
    copy = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert copy.dtype == torch.float32
    prompt = list(range(5, 45))
    with torch.no_grad():
        logprobs = torch.log_softmax(copy(torch.tensor([prompt])).logits[0], dim=-1)
    assert torch.allclose(logprobs, model.logprobs(prompt), atol=1e-5)
    with Engine.from_pretrained(model.path) as engine:
        result = engine.run([GenerationRequest(prompt_token_ids=prompt, max_tokens=0, echo_logprobs=True)])[0]
        assert same_tokens(tmp_path, engine.tokenizer, ["the quick  brown\nfox", "naïve 🙂", ""])
    for i, score in enumerate(result.prompt_logprobs[1:]):
        assert abs(score - logprobs[i, prompt[i + 1]].item()) < 1e-4


def test_the_wheel_models_copy_has_our_tokenizer(wheel_model, tmp_path):
    from flexgen_helm.benchmarks.reference import _export_tokenizer

    _export_tokenizer(wheel_model, tmp_path)
    tokenizer = Tokenizer.from_path(wheel_model)
    assert same_tokens(tmp_path, tokenizer, clients._SAMPLE)


def test_another_family_is_refused(tiny, tmp_path):
    with pytest.raises(UsageError, match="Llama"):
        export(open_checkpoint(tiny("opt").path), tmp_path)


def test_helm_reads_the_entries(tmp_path):
    import cattrs
    import yaml
    from helm.benchmark.model_deployment_registry import ModelDeployments
    from helm.benchmark.model_metadata_registry import ModelMetadataList
    from helm.benchmark.tokenizer_config_registry import TokenizerConfigs

    content = yaml.safe_load(yaml.safe_dump(clients.helm_configs(tmp_path, 96)))
    (deployment,) = cattrs.structure(content["model_deployments.yaml"], ModelDeployments).model_deployments
    (tokenizer,) = cattrs.structure(content["tokenizer_configs.yaml"], TokenizerConfigs).tokenizer_configs
    (metadata,) = cattrs.structure(content["model_metadata.yaml"], ModelMetadataList).models
    assert deployment.name == deployment.tokenizer_name == tokenizer.name == metadata.name == clients.REFERENCE
    assert deployment.client_spec.args["torch_dtype"] == "torch.float32"
    assert deployment.client_spec.args["apply_chat_template"] is False


def test_entries_get_their_model():
    assert clients.with_model("a:b=c", "x/y") == "a:b=c,model=x/y"
    assert clients.with_model("a", "x/y") == "a:model=x/y"


def stat(name, mean, **rest):
    return {"name": {"name": name, "split": "valid", **rest}, "mean": mean, "count": 1}


def test_only_scores_are_compared():
    found = helm_runs.scores(
        [
            stat("exact_match", 0.5),
            stat("inference_runtime", 3.0),
            stat("flexgen_efficiency", 1.0),
            stat("empty", None),
            stat("exact_match", 0.25, perturbation={"name": "typos"}),
        ]
    )
    assert found == {"exact_match valid": 0.5, "exact_match valid typos": 0.25}


def test_differences_follow_the_definition_of_equal_scores():
    ours = {"exact_match": 0.5, "logprob": -1.0, "perplexity": 2.0, "only_ours": 1.0, "f1": 0.1}
    theirs = {"exact_match": 0.5, "logprob": -1.00005, "perplexity": 2.1, "f1": 0.1000001}
    found = clients.differences(ours, theirs)
    assert [(line["metric"], line["why"]) for line in found] == [("f1", None), ("perplexity", None)]


def test_only_known_defects_explain_a_difference():
    ours = {
        "logprob_per_byte test": -0.2,
        "max_prob": 0.3,
        "logprob": -1.0,
        "finish_reason_stop": 1.0,
        "exact_match": 1.0,
    }
    theirs = {
        "logprob_per_byte test": 0.0,
        "max_prob": 1.0,
        "logprob": -2.0,
        "finish_reason_stop": 0.0,
        "exact_match": 0.0,
    }
    unexplained = [line["metric"] for line in clients.differences(ours, theirs) if line["why"] is None]
    assert unexplained == ["exact_match", "logprob"]


def write_run(folder, texts, record=None):
    folder.mkdir(parents=True)
    states = [{"result": {"request_time": 0.5, "completions": [{"text": text}]}} for text in texts]
    (folder / "scenario_state.json").write_text(json.dumps({"request_states": states}))
    (folder / "stats.json").write_text(json.dumps([stat("exact_match", 0.5)]))
    if record:
        (folder / "flexgen_run.json").write_text(json.dumps(record))


RECORD = {"flops": 4e9, "latency_s": 4.0, "hardware": {"matmul_flops": 2e9, "device": "cpu"}}


def test_the_result_has_the_format_of_benchmarks(tmp_path):
    write_run(tmp_path / "ours", ["a", "b"], RECORD)
    write_run(tmp_path / "theirs", ["a", "c"])
    ours = [helm_runs.read_run(tmp_path / "ours", seconds) for seconds in (10.0, 12.0, 11.0)]
    theirs = [helm_runs.read_run(tmp_path / "theirs", seconds) for seconds in (22.0, 23.0, 21.0)]
    slower = [helm_runs.read_run(tmp_path / "theirs", 44.0)]
    runs = {"flexgen": ours, "huggingface -n 1": theirs, "huggingface -n 4": slower}
    found = clients._result(runs, "entry", 2)
    assert {"name", "hardware", "versions", "rows", "ratios"} <= set(found)
    assert [row["median"] for row in found["rows"]] == [11.0, 22.0, 44.0]
    assert {"label", "median", "min", "max", "n"} <= set(found["rows"][0])
    assert found["ratios"]["end_to_end_against_best"] == 2.0
    assert found["scores"] == {"compared": 1, "differing": [], "equal_completions": 1}
    assert found["bound"]["seconds"] == 2.0
    assert found["bound"]["fraction_of_engine"] == 0.5 and found["bound"]["fraction_end_to_end"] == pytest.approx(
        2 / 11
    )
    json.dumps(found, allow_nan=False)


def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path, monkeypatch):
    script = tmp_path / "helm-run"
    script.write_text("#!/bin/sh\necho $FLEXGEN_HELM_HOME\necho the model is gone\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "real"))
    (tmp_path / "real" / "models").mkdir(parents=True)
    (tmp_path / "real" / "journal").mkdir()
    monkeypatch.setattr(helm_runs, "_helm_run_script", lambda: str(script))
    with pytest.raises(FlexgenError, match="ended with 3(.|\n)*the model is gone"):
        helm_runs.helm_run("entry", 1, tmp_path / "run")
    assert (tmp_path / "run" / "home" / "models").resolve() == tmp_path / "real" / "models"
    assert not (tmp_path / "run" / "home" / "journal").exists()


def test_known_benchmarks_exist_and_others_do_not():
    for name in KNOWN:
        assert callable(load(name))
    with pytest.raises(UsageError, match="clients"):
        load("os")


def test_engine_flags_are_refused_where_they_would_be_ignored():
    with pytest.raises(UsageError, match="device"):
        clients.run(Options(engine={"device": "cpu"}))


def test_summary():
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}


def test_the_command_writes_and_shows_the_result(monkeypatch, capsys, tmp_path):
    from flexgen_helm import cli

    seen = []

    def run(options):
        seen.append(options)
        row = {"label": "ours", **summary([1.0, 2.0])}
        return {"name": "clients", "rows": [row], "ratios": {"end_to_end": 1.5}, "notes": ["[bold] is text here"]}

    monkeypatch.setattr(clients, "run", run)
    out = tmp_path / "result.json"
    assert cli.main(["bench", "clients", "-m", "7", "--repeats", "2", "-o", str(out)]) == 0
    assert (seen[0].instances, seen[0].repeats, seen[0].quick) == (7, 2, False)
    assert json.loads(out.read_text())["ratios"] == {"end_to_end": 1.5}
    shown = capsys.readouterr().out
    assert "end to end: 1.50x" in shown and "[bold] is text here" in shown
    assert cli.main(["bench", "clients", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "clients"
    assert cli.main(["bench", "clients", "-o", str(tmp_path / "missing" / "x.json")]) == 2
