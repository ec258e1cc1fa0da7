"""Pickled checkpoints: the same bits as safetensors, one tensor's memory, nothing executed, nothing
half done.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from flexgen_helm import cli
from flexgen_helm.checkpoint import convert as module
from flexgen_helm.checkpoint.convert import convert
from flexgen_helm.checkpoint.fetch import fetch
from flexgen_helm.checkpoint.folder import PICKLE, PICKLE_INDEX
from flexgen_helm.checkpoint.manifest import MANIFEST, hub_conversion
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError, FlexgenError, UsageError
from flexgen_helm.locks import InUseError, sole_writer
from flexgen_helm.paths import state_dir
from flexgen_helm.progress import describe, observed_by
from tests.helpers.fake_hub import COMMIT, LATER, FakeHub
from tests.helpers.model_folders import SMALL_LLAMA, age, edit_config, llama_tensors, write_weights

transformers = pytest.importorskip("transformers")


def tied_tensors(config=SMALL_LLAMA, dtype=torch.float16):
    """A random Llama's tensors, its head being the embedding itself."""
    tensors = {name: tensor.to(dtype) for name, tensor in llama_tensors(config).items()}
    return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}


def write_pickled(folder, tensors=None, shards=1, **config):
    """A model folder as published before safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMALL_LLAMA, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not part of the model")
    torch.save([1, 2], folder / "training_args.bin")
    write_weights(
        folder, tied_tensors() if tensors is None else tensors, torch.save, PICKLE, shards
    )
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_pickled(tmp_path / "m")


@pytest.fixture
def shards(tmp_path):
    return write_pickled(tmp_path / "m", shards=2)


def stored(folder):
    """Every tensor of a converted folder, read by the safetensors library."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def leftovers(folder):
    """What is there of a conversion, whole or begun."""
    return sorted(
        p.name
        for p in folder.parent.iterdir()
        if p == folder or p.name.startswith(f".{folder.name}")
    )


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_types_and_names_stay_as_they_are(tmp_path, dtype):
    tensors = tied_tensors(dtype=dtype)
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors[
        "model.layers.0.self_attn.q_proj.weight"
    ].t()
    tensors["buffer.odd"] = torch.tensor([True, False, True])
    tensors["buffer.scalar"] = torch.tensor(7)
    tensors["buffer.empty"] = torch.zeros(0, 3)
    tensors["buffer.slice"] = tensors["model.norm.weight"][3:9]
    expected = {
        name: tensor.clone() for name, tensor in tensors.items() if name != "lm_head.weight"
    }
    done = convert(write_pickled(tmp_path / "m", {**tensors, "epoch": 3, "args": {"lr": 0.1}}))
    found = stored(done.path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert done.left_out == ("epoch", "args")
    assert done.size == sum(tensor.nbytes for tensor in expected.values())
    with safe_open(done.path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    checkpoint = open_checkpoint(done.path)
    checkpoint.verify()
    assert checkpoint.storage_dtype == (
        torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    )


def test_a_shared_head_is_dropped_only_where_the_model_ties_it(tmp_path):
    apart = {**tied_tensors(), "lm_head.weight": torch.ones(31, 16, dtype=torch.float16)}
    for name, tensors, tied, is_kept in (
        ("tied", None, True, 0),
        ("untied", None, False, 1),
        ("apart", apart, True, 1),
    ):
        path = convert(write_pickled(tmp_path / name, tensors, tie_word_embeddings=tied)).path
        assert ("lm_head.weight" in stored(path)) == is_kept
        open_checkpoint(path).verify()


def test_two_conversions_of_the_same_files_are_the_same_bytes(shards, tmp_path):
    one, two = convert(shards, tmp_path / "one").path, convert(shards, tmp_path / "two").path
    contents = [{file.name: file.read_bytes() for file in path.iterdir()} for path in (one, two)]
    assert contents[0] == contents[1]
    assert not {"README.md", "training_args.bin", PICKLE} & contents[0].keys()
    assert open_checkpoint(one).fingerprint == open_checkpoint(two).fingerprint


# --- memory and disk ------------------------------------------------------------------------------

MEASURED = """
import sys, threading
from flexgen_helm.checkpoint import convert as module
from flexgen_helm.checkpoint import fingerprint
def private():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon:"))
def sample():
    while not done.wait(0.002):
        samples.append(private())
module.convert(sys.argv[2])
if sys.argv[1] == "careless":
    real = module.torch.load
    module.torch.load = lambda file, **options: real(file, **{**options, "mmap": False})
done, samples, before = threading.Event(), [], private()
watcher = threading.Thread(target=sample)
watcher.start()
path = module.convert(sys.argv[3], shard_bytes=64 << 20).path
done.set()
watcher.join()
print(max(samples) - before, len(samples), path)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["as it is", "careless"])
def test_memory_stays_at_one_tensor(tmp_path, how):
    """Sampled while a checkpoint of 13 times the bound is converted; whoever reads it whole is
    caught.
    """
    bound = 16 << 20
    config = {
        **SMALL_LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "vocab_size": 8192,
    }
    tensors = tied_tensors(config)
    turned = "model.layers.1.mlp.up_proj.weight"
    tensors[turned] = tensors[turned].t().contiguous().t()  # the one kind that needs a copy: 8 MiB
    folder = write_pickled(tmp_path / "large", tensors, **config)
    assert (folder / PICKLE).stat().st_size > 13 * bound
    command = [
        sys.executable,
        "-c",
        MEASURED,
        how,
        str(write_pickled(tmp_path / "small")),
        str(folder),
    ]
    private, samples, path = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    assert int(samples) > 20
    assert int(private) > 13 * bound if how == "careless" else int(private) < bound, (
        f"{int(private) / 2**20:.1f} MiB"
    )
    open_checkpoint(path).verify()


def test_a_full_disk_is_known_before_anything_is_written(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    needed = r"takes 9.62 KiB and 1,000 B are free.*[\d,]+ bytes\) are missing.*--out"
    with pytest.raises(CheckpointError, match=needed):
        convert(folder, tmp_path / "out")
    assert not leftovers(tmp_path / "out")


# --- interruption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["_write_shard", "write_synced", "_put_in_place"])
@pytest.mark.parametrize(
    "error, code, said",
    [
        (KeyboardInterrupt(), 130, ""),
        (OSError(errno.ENOSPC, "No space left on device", "f"), 2, "free some room"),
        (SafetensorError("I/O error: No space left on device"), 2, "cannot be written"),
    ],
)
def test_interrupted_anywhere_leaves_nothing_and_starts_over(
    folder, tmp_path, monkeypatch, step, error, code, said, capsys
):
    out, calls = tmp_path / "out", iter([None] if step != "_put_in_place" else [])
    real = getattr(module, step)

    def interrupted(*given):
        for _ in calls:
            return real(*given)
        raise error

    monkeypatch.setattr(module.convert, "__defaults__", (None, None, None, 2000))  # several shards
    monkeypatch.setattr(module, step, interrupted)
    assert cli.main(["convert", str(folder), "--out", str(out)]) == code
    assert said in capsys.readouterr().err and not leftovers(out)
    monkeypatch.setattr(module, step, real)
    assert cli.main(["convert", str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    open_checkpoint(out).verify()


# --- names ----------------------------------------------------------------------------------------


def test_a_folder_finds_its_conversion(folder, tmp_path, monkeypatch):
    age(folder)
    with pytest.raises(CheckpointError, match="flexgen-helm convert"):
        open_checkpoint(folder)
    done = convert(folder)
    assert done.path.is_relative_to(state_dir())
    assert fetch(folder) == done.path
    checkpoint = open_checkpoint(folder)
    checkpoint.verify()
    assert checkpoint.origin == "m" and checkpoint.tokenizer_path == done.path
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", lambda *given: pytest.fail("converted again"))
        assert convert(folder) == done

    # A file that decides results and that the conversion lacks.
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    with pytest.raises(
        CheckpointError, match=("generation_config.json has changed since it was converted")
    ):
        open_checkpoint(folder)
    (folder / "generation_config.json").unlink()
    assert fetch(folder) == done.path

    # Another checkpoint in the same folder: never the old conversion, and convert makes the new
    # one.
    changed = tied_tensors()
    changed["model.norm.weight"][0] += 1
    write_pickled(folder, changed)
    with pytest.raises(
        CheckpointError,
        match=(rf"{PICKLE} has changed since it was converted.*convert .*/m` again"),
    ):
        open_checkpoint(folder)
    assert convert(folder).path == done.path
    assert leftovers(done.path) == [done.path.name]
    assert open_checkpoint(folder).fingerprint != checkpoint.fingerprint
    # The pickle may be deleted then; safetensors beside it are preferred from then on.
    (folder / PICKLE).unlink()
    assert fetch(folder) == done.path
    shutil.copy(done.path / "model.safetensors", folder)
    assert fetch(folder) == folder


def test_an_existing_folder_of_something_else_is_not_touched(folder, tmp_path):
    with pytest.raises(
        UsageError, match=("exists and is no conversion; name another folder with --out")
    ):
        convert(folder, folder)
    convert(folder, tmp_path / "out")
    with pytest.raises(UsageError, match="conversion of another model"):
        convert(write_pickled(tmp_path / "n"), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    open_checkpoint(convert(folder, tmp_path / "empty").path).verify()


def test_nothing_to_convert_says_so(folder, tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    needless = "nothing needs converting"
    for name, said in (
        (convert(folder).path, needless),
        (tmp_path / "m.gguf", needless),
        ("smollm2-135m-instruct-q4_1", needless),
        ("opt-175b", "not published"),
    ):
        assert cli.main(["convert", str(name)]) == 2
        assert said in capsys.readouterr().err


def test_json(tmp_path, capsys):
    folder = write_pickled(tmp_path / "m", {**tied_tensors(), "epoch": 1})
    assert cli.main(["convert", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (
        found["origin"] == "m" and found["left_out"] == ["epoch"] and Path(found["path"]).is_dir()
    )
    assert "left out, being no tensors: epoch" in said.err


# --- traps and damage -----------------------------------------------------------------------------


class Trap:
    """Would create a file where unpickling runs what it names."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("where", ["whole", "shard"])
def test_a_booby_trapped_pickle_is_refused_and_runs_nothing(tmp_path, where, capsys):
    ran = tmp_path / "ran"
    folder = write_pickled(tmp_path / "m", shards=2 if where == "shard" else 1)
    file = sorted(folder.glob("pytorch_model*.bin"))[-1]
    torch.save(Trap(ran) if where == "whole" else {**torch.load(file), "trap": Trap(ran)}, file)
    assert cli.main(["convert", str(folder)]) == 1
    said = capsys.readouterr().err
    assert file.name in said and "posix.system" in said and "nothing of it was executed" in said
    assert "weights_only` set to `False`" not in said, (
        "torch's advice to load it all the same is not passed on"
    )
    assert not ran.exists() and not list((state_dir() / "converted").rglob("*.safetensors"))
    torch.load(file, weights_only=False)  # the trap works where nobody guards it
    assert ran.exists()


def test_pickles_are_opened_in_one_place():
    package = Path(module.__file__).parents[1]
    assert [path.name for path in package.rglob("*.py") if "torch.load(" in path.read_text()] == [
        "convert.py"
    ]


def test_an_old_torch_is_refused(folder, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(UsageError, match=r"torch 2\.9\.1.*2\.10 or later"):
        convert(folder)


def deflated(file):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"x" * 100)


def several(file):
    for name in ("a.bin", "b.bin"):
        file.with_name(name).write_bytes(file.read_bytes())
    file.unlink()


def misplaced(file):
    """The index names the second shard where the first has the tensor."""
    file.unlink()
    folder = write_pickled(file.parent, shards=2)
    index = json.loads((folder / PICKLE_INDEX).read_text())
    index["weight_map"]["model.embed_tokens.weight"] = max(index["weight_map"].values())
    (folder / PICKLE_INDEX).write_text(json.dumps(index))


def flip(file, part):
    content = bytearray(file.read_bytes())
    content[content.index(part) + 5] ^= 4
    file.write_bytes(bytes(content))


def cut(file, kept):
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])


def plus(file, tensor):
    torch.save({**tied_tensors(), "odd": tensor}, file)


def without(file, name):
    torch.save({key: tensor for key, tensor in tied_tensors().items() if key != name}, file)


EMBEDDING = tied_tensors()["model.embed_tokens.weight"].numpy().tobytes()
REFUSED = {
    "old format": (
        lambda file: torch.save(tied_tensors(), file, _use_new_zipfile_serialization=False),
        r"before PyTorch 1\.6.*torch\.save",
    ),
    "lfs pointer": (
        lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "git lfs pull",
    ),
    "a page": (lambda file: file.write_text("<html>"), "no PyTorch checkpoint"),
    "a list": (
        lambda file: torch.save([torch.zeros(2)], file),
        "contains a list, not tensors by name",
    ),
    "compressed": (deflated, r"compresses m/data\.pkl"),
    "empty": (lambda file: cut(file, 0), "no PyTorch checkpoint"),
    "half": (lambda file: cut(file, 0.5), "is truncated"),
    "nearly all": (lambda file: cut(file, 0.999), "pytorch_model.bin is"),
    "flipped bit": (lambda file: flip(file, EMBEDDING), r"is damaged in .*data/\d+"),
    "flipped bit of a name": (
        lambda file: flip(file, b"model.norm.weight"),
        r"is damaged in .*data\.pkl",
    ),
    "repeated": (
        lambda file: plus(file, torch.zeros(1).expand(1 << 40)),
        "tensor odd .*repeats 4 stored bytes",
    ),
    "sparse": (lambda file: plus(file, torch.eye(3).to_sparse()), "tensor odd .*sparse_coo"),
    "complex": (
        lambda file: plus(file, torch.zeros(3, dtype=torch.complex64)),
        "tensor odd .*complex64",
    ),
    "a lacking tensor": (
        lambda file: without(file, "model.norm.weight"),
        r"lacks the tensor model\.norm\.weight",
    ),
    "another shape": (lambda file: edit_config(file.parent, vocab_size=99), r"asks for \[99, 16\]"),
    "no pickle": (lambda file: file.unlink(), "has no pickled weights"),
    "several": (several, r"has 2 pickled files \(a\.bin, b\.bin\)"),
    "misplaced": (misplaced, r"2-of-00002.bin lacks the tensor model\.embed_tokens\.weight"),
}


@pytest.mark.parametrize("spoil, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_converted_is_named_and_nothing_is_left(folder, tmp_path, spoil, words):
    spoil(folder / PICKLE)
    with pytest.raises(CheckpointError, match=words):
        convert(folder, tmp_path / "out")
    assert not leftovers(tmp_path / "out")


def test_a_hash_in_a_link_stands_for_the_checksums(folder, tmp_path):
    """A folder of links into the hub's store, named by path: the hash is compared, not only
    believed.
    """
    blob = tmp_path / hashlib.sha256((folder / PICKLE).read_bytes()).hexdigest()
    (folder / PICKLE).rename(blob)
    (folder / PICKLE).symlink_to(blob)
    convert(folder, tmp_path / "out")
    flip(blob, EMBEDDING)
    with pytest.raises(CheckpointError, match=rf"{PICKLE} is damaged.*{blob.name[:16]}"):
        convert(folder, tmp_path / "other")


def test_a_home_that_cannot_be_written_is_named(folder, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(folder / "config.json" / "below a file"))
    with pytest.raises(UsageError, match="^FLEXGEN_HELM_HOME: .* cannot be written"):
        convert(folder)


def test_a_second_process_is_told_of_the_first(folder, tmp_path):
    with (
        sole_writer(tmp_path / "out", "-o"),
        pytest.raises(InUseError, match="--out: .*out is written by process"),
    ):
        convert(folder, tmp_path / "out")


# --- damage to a conversion -----------------------------------------------------------------------


def of_another_digit(content):
    at = content.rindex(b'"model.safetensors": "') + 22
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def but_one(content):
    # of weights the lowest bit: finite as before
    return content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]


@pytest.mark.parametrize(
    "name, change",
    [
        ("config.json", but_one),
        ("tokenizer.json", but_one),
        ("model.safetensors", but_one),
        (MANIFEST, of_another_digit),
        (MANIFEST, b"[]"),
        (MANIFEST, b"{}"),
        (MANIFEST, b'{"format": "flexgen_helm conversion 2"}'),
    ],
)
def test_damage_is_refused_when_opening(folder, name, change):
    done = convert(folder).path
    is_whole = isinstance(change, bytes)
    (done / name).write_bytes(change if is_whole else change((done / name).read_bytes()))
    with pytest.raises(
        CheckpointError, match=(rf"is damaged|no readable JSON|has changed|{MANIFEST}")
    ):
        open_checkpoint(done).verify()
    if is_whole:  # an unusable manifest is made anew
        open_checkpoint(convert(folder).path).verify()


# --- the hub --------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one repository of pickled shards."""
    source = write_pickled(tmp_path / "published", shards=2)
    (source / "pytorch_model-00009-of-00009.bin").write_bytes(b"not in the index")
    return FakeHub(source, tmp_path / "hub", monkeypatch)


def test_a_hub_model_is_converted_once_and_found_by_its_name(hub):
    with pytest.raises(CheckpointError, match="flexgen-helm convert org--repo"):
        fetch("org/repo")
    assert not hub.asked, "pickles are fetched under convert only"
    events = []
    with observed_by(events.append):
        done = convert("flexgen/org--repo")
    assert done.path == hub_conversion("org/repo", COMMIT) and done.origin == f"org/repo@{COMMIT}"
    pickles = {name for name in hub.asked if name.endswith(".bin")}
    assert pickles == {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"}
    lines = [describe(event) for event in events]
    assert COMMIT[:12] in lines[0] and "hf cache rm" in lines[-1]
    assert set(json.loads((done.path / MANIFEST).read_text())["sources"]) == pickles
    for name in ("org/repo", "flexgen/org--repo-4bit"):
        checkpoint = open_checkpoint(name)
        checkpoint.verify()
        assert checkpoint.origin == f"org/repo@{COMMIT}"
    # Without a network, and without the pickles, the name and the branch mean the same commit.
    hub.online = False
    shutil.rmtree(hub.cache)
    for revision in (None, "main", COMMIT):
        assert fetch("org/repo", revision) == done.path
    with pytest.raises(CheckpointError, match="org/repo at v2"):
        fetch("org/repo", "v2")
    # A later commit is another model.
    hub.online, hub.commit = True, LATER
    with pytest.raises(CheckpointError, match="flexgen-helm convert org--repo"):
        fetch("org/repo")
    assert fetch("org/repo", COMMIT) == done.path
    assert convert("org/repo").path == fetch("org/repo") == hub_conversion("org/repo", LATER)


def test_cached_pickles_are_converted_without_a_network(hub):
    convert("org/repo", state_dir() / "elsewhere")
    hub.online = False
    assert convert("org/repo").path == hub_conversion("org/repo", COMMIT)
    shard = hub.snapshot / "pytorch_model-00002-of-00002.bin"
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}, which is missing"):
        convert("org/repo", state_dir() / "third")


@pytest.mark.parametrize(
    "file, content, error, message",
    [
        ("model.safetensors", "", UsageError, "nothing needs converting"),
        (
            "config.json",
            json.dumps({**SMALL_LLAMA, "architectures": ["RwkvForCausalLM"]}),
            FlexgenError,
            "RwkvFor",
        ),
        (
            "README.md",
            "",
            CheckpointError,
            r"and its conversion take [\d.]+ KiB and 1,000 B are free.*missing",
        ),
    ],
)
def test_the_hub_is_asked_for_no_weights_in_vain(hub, monkeypatch, file, content, error, message):
    (hub.source / file).write_text(content)
    monkeypatch.setattr(
        "flexgen_helm.checkpoint.folder.shutil.disk_usage", lambda path: SimpleNamespace(free=1000)
    )
    with pytest.raises(error, match=message):
        convert("org/repo")
    assert not any(name.endswith(".bin") for name in hub.asked)
