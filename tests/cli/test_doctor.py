"""`doctor`: each promise that can be checked on a machine, and what it says where one is broken."""

from __future__ import annotations

import json
import os
import resource
import shutil
from types import SimpleNamespace

import pytest

from flexgen_helm import cli
from flexgen_helm.cli import doctor as module
from tests.helpers.small_disks import read_only


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLEXGEN_HELM_DATA", raising=False)
    # A fresh interpreter with HELM takes many seconds; each of these has a test of its own.
    monkeypatch.setattr(module, "_python_subprocess", lambda code, *arguments: None)


def doctor(capsys, *argv):
    code = cli.main(["doctor", "--json", *argv])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    for check in found["checks"]:
        assert check["status"] in ("ok", "warning", "failed")
        assert check["status"] == "failed" or (check["remedy"] is None) == (check["status"] == "ok")
    return {check["name"]: check for check in found["checks"]}


def test_doctor_verifies_a_model(tiny, own_home, capsys, tmp_path):
    model = str(tiny("llama").path)
    found = doctor(capsys, model)
    assert found[f"weights of {model}"]["status"] == "ok"
    assert found["weights"]["status"] == "warning" and "fetch" in found["weights"]["remedy"]
    assert found["journal"]["status"] == "ok" and (tmp_path / "home" / "journal").is_dir()


def test_doctor_reads_tokenizer_and_template(tiny, own_home, capsys, tmp_path):
    model = tmp_path / "mine"
    shutil.copytree(tiny("llama").path, model)
    check = f"prompts of {model}"
    assert doctor(capsys, str(model))[check]["found"].startswith(f"prompts of {model} are sent unchanged (auto: the ")
    (model / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    found = doctor(capsys, str(model))[check]
    assert found["status"] == "failed" and "the chat template of" in found["found"]
    for file in model.glob("*token*"):
        file.unlink()
    found = doctor(capsys, str(model))[check]
    assert found["status"] == "failed" and "put its tokenizer.json beside the weights" in found["found"]


@pytest.mark.parametrize(("release", "status"), [("5.23.0", "ok"), ("5.23.0+cpu", "ok"), ("5.99.0", "warning")])
def test_doctor_names_releases_that_no_test_has_seen(release, status, monkeypatch):
    installed = module.metadata.version
    monkeypatch.setattr(module.metadata, "version", lambda name: release if name == "transformers" else installed(name))
    monkeypatch.setattr(
        "flexgen_helm.engine.proof.proved_table",
        lambda: {
            "tested": {"transformers": ["5.20.0", "5.23.0"], "torch": [module._installed("torch").partition("+")[0]]}
        },
    )
    finding = module._tested()
    assert finding.status == status and release.partition("+")[0] in finding.found
    if status == "warning":
        assert "transformers 5.99.0" in finding.found and "torch" not in finding.found
        assert "transformers 5.23.0" in finding.remedy


def test_doctor_says_what_to_do(own_home, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr(
        module, "_python_subprocess", lambda code, *arguments: "operator torchvision::nms does not exist"
    )
    monkeypatch.setattr(module.metadata, "version", lambda package: "0.6.1" if package == "crfm-helm" else "1.0")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "journal").write_text("in the way")
    assert cli.main(["doctor", "--json"]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    for name in ("HELM", "plugin", "torchvision", "offline data", "journal"):
        assert found[name]["status"] == "failed" and found[name]["remedy"], name
    assert "uninstall torchvision" in found["torchvision"]["remedy"]


def test_a_home_that_cannot_be_written_is_no_defect_to_report(own_home, capsys, tmp_path):
    (tmp_path / "home").mkdir()
    with read_only(tmp_path / "home"):
        found = doctor(capsys)
    for name in ("journal", "locks", "direct reads"):
        said = f"{found[name]['found']} {found[name]['remedy']}"
        assert "Read-only file system" in said and "FLEXGEN_HELM_HOME" in said and "Error" not in said


def test_data_that_nothing_reads_is_named(own_home, monkeypatch, tmp_path):
    for name in ("mmlu", "lambada_openai_test.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.setenv("FLEXGEN_HELM_DATA", str(tmp_path))
    assert "has lambada_openai_test.jsonl; nothing reads mmlu there" in module._data().found


def test_a_network_disk_is_noticed(own_home, monkeypatch):
    mounts = [SimpleNamespace(mountpoint="/", fstype="nfs4"), SimpleNamespace(mountpoint="/elsewhere", fstype="ext4")]
    monkeypatch.setattr(module.psutil, "disk_partitions", lambda all: mounts)
    assert module.run_checks()["journal"].status == "warning"


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    def broken():
        raise ImportError("libcudart is missing")

    monkeypatch.setattr(module, "_CHECKS", {"torch": broken, "python": module._python})
    assert [finding.status for finding in module.run_checks().values()] == ["failed", "ok"]


# Each promise, broken


def test_a_version_with_a_hole_is_not_supported(monkeypatch):
    honest = module.metadata.version
    assert module._packages().status == "ok"
    monkeypatch.setattr(module.metadata, "version", lambda name: "5.2.0" if name == "transformers" else honest(name))
    finding = module._packages()
    assert finding.status == "failed" and finding.found == "not supported: transformers 5.2.0"
    assert 'pip install "transformers' in finding.remedy and ">=5.20" in finding.remedy


def test_limits_of_the_process_are_seen(monkeypatch):
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limits = {}
    monkeypatch.setattr(module.resource, "getrlimit", lambda which: limits.get(which, unlimited))
    assert module._limits().status == "ok"
    limits.update({resource.RLIMIT_NOFILE: (256, 1024), resource.RLIMIT_FSIZE: (1 << 30, 1 << 30)})
    finding = module._limits()
    assert finding.status == "warning"
    assert finding.found == "ulimit -n (open files) 1,024, -f (file size) 1 GiB"
    limits[resource.RLIMIT_AS] = (3 << 30, 3 << 30)
    finding = module._limits()
    assert finding.status == "failed" and finding.found.startswith("ulimit -v is 3 GiB of address space, and")
    limits[resource.RLIMIT_AS] = (1 << 50, 1 << 50)
    assert module._limits().status == "warning"


def test_answers_that_are_not_found_again_are_noticed(own_home, monkeypatch):
    from flexgen_helm.response_cache import ResponseCache

    assert module._response_cache().status == "ok"
    monkeypatch.setattr(ResponseCache, "get_many", lambda self, keys: {})
    assert "not found again" in module._response_cache().found


def test_a_lock_that_another_process_gets_is_noticed(tmp_path, monkeypatch):
    """On a disk whose locks are ignored."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path))
    assert module._locks().status == "ok"
    monkeypatch.setattr(module.fcntl, "flock", lambda *_: None)
    assert module._locks().found.endswith("two processes hold one lock")


def test_a_disk_without_direct_reads_is_a_warning(own_home, monkeypatch):
    honest = os.open

    def refusing(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return honest(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    finding = module._direct_reads()
    assert finding.status == "warning" and "--offload-dir" in finding.remedy
