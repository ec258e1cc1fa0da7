"""Pickled checkpoints: the same bits as safetensors, one tensor's memory, nothing executed, nothing half done."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors import safe_open
from safetensors.torch import load_file

from flexgen_helm import cli
from flexgen_helm.checkpoint import convert as module
from flexgen_helm.checkpoint import fingerprint
from flexgen_helm.checkpoint.convert import convert
from flexgen_helm.checkpoint.fetch import fetch
from flexgen_helm.checkpoint.folder import PICKLE, PICKLE_INDEX
from flexgen_helm.checkpoint.manifest import MANIFEST, hub_conversion
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.paths import state_dir
from flexgen_helm.errors import CheckpointError, UnsupportedArchitectureError, UsageError
from flexgen_helm.locks import InUseError, sole_writer
from flexgen_helm.progress import describe, observed_by
from tests.helpers.forks import python
from tests.helpers.model_folders import SMALL_LLAMA, age, llama_tensors

transformers = pytest.importorskip("transformers")

COMMIT, LATER = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"


def tied_tensors(config=SMALL_LLAMA, dtype=torch.float16):
    """A random Llama's tensors, its head being the embedding itself."""
    tensors = {name: tensor.to(dtype) for name, tensor in llama_tensors(config).items()}
    return {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}


def write_pickled(folder, tensors=None, shards=1, **config):
    """A model folder as published before safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tied_tensors() if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps({**SMALL_LLAMA, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not part of the model")
    torch.save([1, 2], folder / "training_args.bin")
    if shards == 1:
        torch.save(tensors, folder / PICKLE)
        return folder
    names = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    weight_map = {name: names[i * shards // len(tensors)] for i, name in enumerate(tensors)}
    for file in names:
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / PICKLE_INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def stored(folder):
    """Every tensor of a converted folder, read by the safetensors library."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def leftovers(folder):
    return sorted(path.name for path in folder.parent.glob(f".{folder.name}*"))


# --- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_types_and_names_stay_as_they_are(tmp_path, dtype):
    tensors = tied_tensors(dtype=dtype)
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].t()
    tensors["buffer.odd"] = torch.tensor([True, False, True])
    tensors["buffer.scalar"] = torch.tensor(7)
    tensors["buffer.empty"] = torch.zeros(0, 3)
    tensors["buffer.slice"] = tensors["model.norm.weight"][3:9]
    expected = {name: tensor.clone() for name, tensor in tensors.items() if name != "lm_head.weight"}
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
    assert checkpoint.storage_dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)


def test_a_shared_head_is_dropped_only_where_the_model_ties_it(tmp_path):
    assert "lm_head.weight" not in stored(convert(write_pickled(tmp_path / "tied")).path)
    untied = convert(write_pickled(tmp_path / "untied", tie_word_embeddings=False))
    assert "lm_head.weight" in stored(untied.path)
    open_checkpoint(untied.path).verify()
    apart = {**tied_tensors(), "lm_head.weight": torch.ones(31, 16, dtype=torch.float16)}
    assert "lm_head.weight" in stored(convert(write_pickled(tmp_path / "apart", apart)).path)


def test_two_conversions_of_the_same_files_are_the_same_bytes(tmp_path):
    folder = write_pickled(tmp_path / "m", shards=2)
    one, two = convert(folder, tmp_path / "one").path, convert(folder, tmp_path / "two").path
    assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in two.iterdir())
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()
    assert not {"README.md", "training_args.bin", PICKLE} & {p.name for p in one.iterdir()}
    assert open_checkpoint(one).fingerprint == open_checkpoint(two).fingerprint
    changed = tied_tensors()
    changed["model.norm.weight"][0] += 1
    later = convert(write_pickled(tmp_path / "later", changed)).path
    assert open_checkpoint(later).fingerprint != open_checkpoint(one).fingerprint


# --- memory and disk ----------------------------------------------------------------------------------------------

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
    """Sampled while a checkpoint of 13 times the bound is converted; whoever reads it whole is caught."""
    bound = 16 << 20
    config = {**SMALL_LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 8192}
    tensors = tied_tensors(config)
    turned = "model.layers.1.mlp.up_proj.weight"
    tensors[turned] = tensors[turned].t().contiguous().t()  # the one kind that needs a copy: 8 MiB
    folder = write_pickled(tmp_path / "large", tensors, **config)
    assert (folder / PICKLE).stat().st_size > 13 * bound
    command = [sys.executable, "-c", MEASURED, how, str(write_pickled(tmp_path / "small")), str(folder)]
    private, samples, path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(samples) > 20
    assert int(private) > 13 * bound if how == "careless" else int(private) < bound, f"{int(private) / 2**20:.1f} MiB"
    open_checkpoint(path).verify()


def test_a_full_disk_is_known_before_anything_is_written(tmp_path, monkeypatch):
    folder = write_pickled(tmp_path / "m")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(
        CheckpointError, match=r"takes 9.62 KiB and 1,000 B are free.*[\d,]+ bytes\) are missing.*--out"
    ):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not leftovers(tmp_path / "out")


@pytest.mark.slow
def test_a_disk_that_fills_meanwhile_leaves_nothing(tmp_path):
    folder = write_pickled(tmp_path / "m")
    code = (
        "import resource, signal, sys\nfrom flexgen_helm.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
        "sys.exit(main(['convert', sys.argv[1], '--out', sys.argv[2]]))"
    )
    command = [*python("all"), "-c", code, str(folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "cannot be written" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists() and not leftovers(tmp_path / "out")


# --- interruption -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["_write_shard", "write_synced", "_put_in_place"])
def test_interrupted_anywhere_leaves_nothing_and_starts_over(tmp_path, monkeypatch, step, capsys):
    folder, out = write_pickled(tmp_path / "m"), tmp_path / "out"
    calls, real = [0], getattr(module, step)

    def interrupted(*given):
        calls[0] += 1
        if calls[0] == (1 if step == "_put_in_place" else 2):
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(module.convert, "__defaults__", (None, None, None, 2000))
    monkeypatch.setattr(module, step, interrupted)
    assert cli.main(["convert", str(folder), "--out", str(out)]) == 130
    assert not out.exists() and not leftovers(out)
    monkeypatch.setattr(module, step, real)
    assert cli.main(["convert", str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    open_checkpoint(out).verify()


# --- names --------------------------------------------------------------------------------------------------------


def test_a_folder_finds_its_conversion(tmp_path, monkeypatch):
    folder = write_pickled(tmp_path / "m")
    age(folder)
    with pytest.raises(CheckpointError, match="flexgen-helm convert"):
        open_checkpoint(folder)
    done = convert(folder)
    assert done.path.is_relative_to(state_dir())
    assert fetch(folder) == done.path
    checkpoint = open_checkpoint(folder)
    checkpoint.verify()
    assert checkpoint.origin == "m" and checkpoint.tokenizer_path == done.path
    monkeypatch.setattr(module, "_write", lambda *given: pytest.fail("converted again"))
    assert convert(folder) == done
    monkeypatch.undo()
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))

    # A file that decides results and that the conversion lacks.
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    with pytest.raises(CheckpointError, match="generation_config.json has changed since it was converted"):
        open_checkpoint(folder)
    (folder / "generation_config.json").unlink()
    assert fetch(folder) == done.path

    # Another checkpoint in the same folder: never the old conversion, and convert makes the new one.
    changed = tied_tensors()
    changed["model.norm.weight"][0] += 1
    write_pickled(folder, changed)
    with pytest.raises(CheckpointError, match=rf"{PICKLE} has changed since it was converted.*convert .*/m` again"):
        open_checkpoint(folder)
    again = convert(folder)
    assert again.path == done.path and not leftovers(done.path)
    assert open_checkpoint(folder).fingerprint != checkpoint.fingerprint
    # The pickle may be deleted then; safetensors beside it are preferred from then on.
    (folder / PICKLE).unlink()
    assert fetch(folder) == done.path
    shutil.copy(done.path / "model.safetensors", folder)
    assert fetch(folder) == folder


def test_an_existing_folder_of_something_else_is_not_touched(tmp_path):
    folder, another = write_pickled(tmp_path / "m"), write_pickled(tmp_path / "n")
    with pytest.raises(UsageError, match="exists and is no conversion; name another folder with --out"):
        convert(folder, folder)
    convert(folder, tmp_path / "out")
    with pytest.raises(UsageError, match="conversion of another model"):
        convert(another, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    open_checkpoint(convert(folder, tmp_path / "empty").path).verify()


def test_nothing_to_convert_says_so(tmp_path, capsys):
    folder = write_pickled(tmp_path / "m")
    done = convert(folder)
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    for name in (str(done.path), str(gguf), "smollm2-135m-instruct-q4_1"):
        assert cli.main(["convert", name]) == 2
        assert "nothing needs converting" in capsys.readouterr().err
    assert cli.main(["convert", "opt-175b"]) == 2
    assert "not published" in capsys.readouterr().err
    (folder / PICKLE).unlink()
    with pytest.raises(CheckpointError, match="has no pickled weights"):
        convert(folder)
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"has 2 pickled files \(a\.bin, b\.bin\)"):
        convert(folder)


def test_json(tmp_path, capsys):
    folder = write_pickled(tmp_path / "m", {**tied_tensors(), "epoch": 1})
    assert cli.main(["convert", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["origin"] == "m" and found["left_out"] == ["epoch"] and Path(found["path"]).is_dir()
    assert "left out, being no tensors: epoch" in said.err


# --- traps and damage ---------------------------------------------------------------------------------------------


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
    tensors = torch.load(file, weights_only=True)
    torch.save(Trap(ran) if where == "whole" else {**tensors, "trap": Trap(ran)}, file)
    assert cli.main(["convert", str(folder)]) == 1
    said = capsys.readouterr().err
    assert file.name in said and "posix.system" in said and "nothing of it was executed" in said
    assert "weights_only` set to `False`" not in said, "torch's advice to load it all the same is not passed on"
    assert not ran.exists() and not list((state_dir() / "converted").rglob("*.safetensors"))
    torch.load(file, weights_only=False)  # the trap works where nobody guards it
    assert ran.exists()


def test_pickles_are_opened_in_one_place_and_guarded():
    package = Path(module.__file__).parents[1]
    found = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                found[path.name] = {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert not (isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in ast.unparse(node))
    assert found == {"convert.py": {"map_location": "'cpu'", "weights_only": "True", "mmap": "True"}}


def test_an_old_torch_is_refused(tmp_path, monkeypatch):
    folder = write_pickled(tmp_path / "m")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(UsageError, match=r"torch 2\.9\.1.*2\.10 or later"):
        convert(folder)


def deflated(file):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"x" * 100)


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
    "a list": (lambda file: torch.save([torch.zeros(2)], file), "contains a list, not tensors by name"),
    "compressed": (deflated, r"compresses m/data\.pkl"),
    "empty": (lambda file: cut(file, 0), "no PyTorch checkpoint"),
    "half": (lambda file: cut(file, 0.5), "is truncated"),
    "nearly all": (lambda file: cut(file, 0.999), "pytorch_model.bin is"),
    "flipped bit": (lambda file: flip(file, EMBEDDING), r"is damaged in .*data/\d+"),
    "flipped bit of a name": (lambda file: flip(file, b"model.norm.weight"), r"is damaged in .*data\.pkl"),
    "repeated": (lambda file: plus(file, torch.zeros(1).expand(1 << 40)), "tensor odd .*repeats 4 stored bytes"),
    "sparse": (lambda file: plus(file, torch.eye(3).to_sparse()), "tensor odd .*sparse_coo"),
    "complex": (lambda file: plus(file, torch.zeros(3, dtype=torch.complex64)), "tensor odd .*complex64"),
    "a lacking tensor": (lambda file: without(file, "model.norm.weight"), r"lacks the tensor model\.norm\.weight"),
    "another shape": (
        lambda file: (file.parent / "config.json").write_text(json.dumps({**SMALL_LLAMA, "vocab_size": 99})),
        r"asks for \[99, 16\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_converted_is_named_and_nothing_is_left(tmp_path, how):
    spoil, words = REFUSED[how]
    folder = write_pickled(tmp_path / "m")
    spoil(folder / PICKLE)
    with pytest.raises(CheckpointError, match=words):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not leftovers(tmp_path / "out")


def test_a_hash_in_a_link_stands_for_the_checksums(tmp_path):
    """A folder of links into the hub's store, named by path: the hash is compared, not only believed."""
    folder = write_pickled(tmp_path / "m")
    content = (folder / PICKLE).read_bytes()
    blob = tmp_path / hashlib.sha256(content).hexdigest()
    (folder / PICKLE).rename(blob)
    (folder / PICKLE).symlink_to(blob)
    convert(folder, tmp_path / "out")
    blob.write_bytes(content[:2000] + bytes([content[2000] ^ 1]) + content[2001:])
    with pytest.raises(CheckpointError, match=rf"{PICKLE} is damaged.*{blob.name[:16]}"):
        convert(folder, tmp_path / "other")


def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    folder = write_pickled(tmp_path / "m")
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(folder / "config.json" / "below a file"))
    with pytest.raises(UsageError, match="^FLEXGEN_HELM_HOME: .* cannot be written"):
        convert(folder)


def test_a_second_process_is_told_of_the_first(tmp_path):
    folder = write_pickled(tmp_path / "m")
    with (
        sole_writer(tmp_path / "out", "-o"),
        pytest.raises(InUseError, match="--out: .*out is written by process"),
    ):
        convert(folder, tmp_path / "out")


def test_an_index_and_its_shards_must_agree(tmp_path):
    folder = write_pickled(tmp_path / "m", shards=2)
    index = json.loads((folder / PICKLE_INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    index["weight_map"]["model.embed_tokens.weight"] = second
    (folder / PICKLE_INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{second} lacks the tensor model\.embed_tokens\.weight"):
        convert(folder)


# --- damage to a conversion ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", MANIFEST])
def test_damage_is_refused_when_opening(tmp_path, name):
    done = convert(write_pickled(tmp_path / "m")).path
    content = bytearray((done / name).read_bytes())
    if name == MANIFEST:
        content[content.rindex(b'"model.safetensors": "') + 22] ^= 1  # another digit, or none: never the right one
    else:
        content[-2] ^= 1  # of weights the lowest bit: finite as before
    (done / name).write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"is damaged|no readable JSON|has changed"):
        open_checkpoint(done).verify()


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "flexgen_helm conversion 2"}'])
def test_an_unusable_manifest_is_refused_and_made_anew(tmp_path, content):
    folder = write_pickled(tmp_path / "m")
    done = convert(folder).path
    (done / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError, match=MANIFEST):
        open_checkpoint(done)
    open_checkpoint(convert(folder).path).verify()


def test_files_are_hashed_at_the_first_load_only(tmp_path, monkeypatch):
    done = convert(write_pickled(tmp_path / "m"), shard_bytes=2000).path
    age(done)
    monkeypatch.setattr(fingerprint, "_SMALL", 0)
    hashed, honest = set(), fingerprint.hash_file
    monkeypatch.setattr(fingerprint, "hash_file", lambda path: hashed.add(path) or honest(path))

    def load():
        hashed.clear()
        assert open_checkpoint(done).tensor("head.norm.weight").isfinite().all()
        return {path for path in hashed if path.suffix == ".safetensors"}

    shards = set(done.glob("*.safetensors"))
    assert (load(), load()) == (shards, set())
    file = sorted(shards)[0]
    os.utime(file, (time.time() - 30, time.time() - 30))
    assert load() == {file}, "another date, another look"
    hashed.clear()
    open_checkpoint(done).verify()
    assert hashed >= shards, "verify looks again"


# --- the hub ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one repository of pickled shards, reached without a network; `asked` lists what was downloaded."""
    cache, source = tmp_path / "hub", write_pickled(tmp_path / "published", shards=2)
    (source / "pytorch_model-00009-of-00009.bin").write_bytes(b"not in the index")
    state = SimpleNamespace(commit=COMMIT, online=True, asked=[], cache=cache, source=source)

    class Api:
        def model_info(self, repo, revision=None, **options):
            if not state.online:
                raise ConnectionError
            files = [SimpleNamespace(rfilename=f.name, size=f.stat().st_size) for f in source.iterdir()]
            return SimpleNamespace(sha=state.commit, siblings=files)

    real = huggingface_hub.snapshot_download

    def download(repo, revision=None, **options):
        if options.get("local_files_only"):
            return real(repo, revision=revision, **options)
        assert state.online
        folder = cache / "models--org--repo" / "snapshots" / str(revision)
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if any(Path(file.name).match(pattern) for pattern in options["allow_patterns"]):
                state.asked.append(file.name)
                shutil.copy(file, folder / file.name)
        return str(folder)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return state


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


def test_a_later_commit_is_another_model(hub):
    first = convert("org/repo")
    hub.commit = LATER
    with pytest.raises(CheckpointError, match="flexgen-helm convert org--repo"):
        fetch("org/repo")
    assert fetch("org/repo", COMMIT) == first.path
    second = convert("org/repo")
    assert second.path.name == LATER and fetch("org/repo") == second.path


def test_cached_pickles_are_converted_without_a_network(hub):
    convert("org/repo", state_dir() / "elsewhere")
    hub.online, hub.asked = False, []
    assert convert("org/repo").path == hub_conversion("org/repo", COMMIT)
    shard = hub.cache / "models--org--repo" / "snapshots" / COMMIT / "pytorch_model-00002-of-00002.bin"
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}, which is missing"):
        convert("org/repo", state_dir() / "third")


def test_the_hub_is_asked_for_nothing_in_vain(hub, monkeypatch):
    (hub.source / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="nothing needs converting"):
        convert("org/repo")
    assert not hub.asked
    (hub.source / "model.safetensors").unlink()
    monkeypatch.setattr("flexgen_helm.checkpoint.folder.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"and its conversion take [\d.]+ KiB and 1,000 B are free.*missing"):
        convert("org/repo")
    assert not any(name.endswith(".bin") for name in hub.asked)
    monkeypatch.undo()


def test_a_foreign_architecture_is_refused_before_its_weights_come(hub):
    config = {**SMALL_LLAMA, "architectures": ["RwkvForCausalLM"]}
    (hub.source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitectureError, match="RwkvForCausalLM"):
        convert("org/repo")
    assert not any(name.endswith(".bin") for name in hub.asked)
