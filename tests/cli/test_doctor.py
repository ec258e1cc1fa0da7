"""`doctor`: each check where it passes, and where what it looks at is broken."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from flexgen_helm import cli
from flexgen_helm.cli import doctor as module

NAMES = (
    "python",
    "packages",
    "tested",
    "plugin",
    "torch",
    "GPU",
    "memory",
    "disk",
    "offline data",
    "weights",
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLEXGEN_HELM_DATA", raising=False)
    # A fresh interpreter with HELM takes many seconds.
    monkeypatch.setattr(module, "_python_subprocess", lambda code, *arguments: None)


def doctor(capsys, *argv):
    code = cli.main(["doctor", "--json", *argv])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    for check in found["checks"]:
        assert check["status"] == "failed" or (check["remedy"] is None) == (check["status"] == "ok")
    return {
        check["name"]: (check["status"], f"{check['found']} {check['remedy']}")
        for check in found["checks"]
    }


def versions(monkeypatch, **changed):
    installed = module.metadata.version
    names = {name.replace("_", "-"): version for name, version in changed.items()}
    monkeypatch.setattr(module.metadata, "version", lambda name: names.get(name) or installed(name))


def untested(monkeypatch, tmp_path):
    tested = {
        "transformers": ["5.20.0", "5.23.0"],
        "torch": [module._installed("torch").partition("+")[0]],
    }
    monkeypatch.setattr("flexgen_helm.engine.proof.proved_table", lambda: {"tested": tested})
    versions(monkeypatch, transformers="5.99.0")


def data(monkeypatch, tmp_path, *names):
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path if names else tmp_path / "nowhere"))


def broken(monkeypatch):
    def check():
        raise ImportError("libcudart is missing")

    monkeypatch.setitem(module._CHECKS, "torch", check)


BROKEN = {
    "packages": (lambda m, t: versions(m, transformers="5.2.0"), "failed", "transformers 5.2.0 Run: pip"),
    "packages of HELM": (lambda m, t: versions(m, crfm_helm="0.6.1"), "failed", 'pip install "crfm-helm<0.6'),
    "packages of an extra": (lambda m, t: versions(m, lm_eval="0.3.0"), "failed", "not supported: lm-eval 0.3.0"),
    "tested": (untested, "warning", "no test has seen transformers 5.99.0 A model of each kind"),
    "tested, a build": (lambda m, t: versions(m, torch=f"{module._installed('torch')}+cpu"), "ok", "torch"),
    "plugin": (lambda m, t: m.setattr(module, "_python_subprocess", lambda *_: "no"), "failed", ": no Mend"),
    "torch": (lambda m, t: broken(m), "failed", "libcudart is missing Report this with"),
    "memory": (
        lambda m,
        t: m.setattr(module, "host_memory", lambda: SimpleNamespace(available=1, total=2, group_limit=2)), "warning",
        "a container, or a job of a cluster) Close other programs",
    ),
    "disk": (
        lambda m, t: m.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1)),
        "warning",
        "name another folder in FLEXGEN_HELM_HOME",
    ),
    "offline "
    "data": (lambda m, t: data(m, t), "failed", "which is no folder Name an existing folder"),
    "offline data, unread": (
        lambda m, t: data(m, t, "mmlu", "lambada_openai_test.jsonl"),
        "ok",
        "has lambada_openai_test.jsonl; nothing reads mmlu there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, case", BROKEN.items(), ids=BROKEN)
def test_what_is_broken_is_named_with_its_remedy(name, case, monkeypatch, tmp_path, capsys):
    spoil, status, words = case
    spoil(monkeypatch, tmp_path)
    found = doctor(capsys)
    name = name.partition(",")[0].partition(" of ")[0]
    assert found[name][0] == status and words in found[name][1], found[name]


def test_a_model_is_read_whole_with_its_tokenizer_and_template(tiny, capsys, tmp_path):
    model = tmp_path / "mine"
    shutil.copytree(tiny("llama").path, model)
    prompts = f"prompts of {model}"
    found = doctor(capsys, str(model))
    assert tuple(found)[:-2] == NAMES and found[f"weights of {model}"][0] == "ok"
    assert found["weights"][0] == "warning" and "flexgen-helm fetch" in found["weights"][1]
    assert found[prompts][1].startswith(f"prompts of {model} are sent unchanged (auto: the ")
    (model / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    status, said = doctor(capsys, str(model))[prompts]
    assert status == "failed" and "the chat template of" in said
    for file in model.glob("*token*"):
        file.unlink()
    status, said = doctor(capsys, str(model))[prompts]
    assert status == "failed" and "put its tokenizer.json beside the weights" in said
