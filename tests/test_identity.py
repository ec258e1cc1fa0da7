"""What a user's disk keeps must survive a new version: packed weights of version 0.1.0 are reused,
and so are cached answers unless `RESULTS_VERSION` was raised because values have changed.

`data/identities_of_0_1_0.json` holds digests that 0.1.0 computed, `data/written_by_0_1_0.zip` what
it wrote for the model that `write_model` makes: packed weights of three precisions, and the answers
to `REQUESTS`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import zipfile
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.config import EngineConfig
from flexgen_helm.identity import Identified, text_of
from flexgen_helm.models.decoder_config import RopeConfig
from flexgen_helm.quant.precisions import PRECISIONS
from flexgen_helm.request import GenerationRequest
from flexgen_helm.response_cache import ResponseCache, response_cache_path
from flexgen_helm.service.service import request_key
from tests.helpers.paths import DATA
from tests.helpers.tiny_models import save_tokenizer

GOLDEN: dict[str, Any] = json.loads((DATA / "identities_of_0_1_0.json").read_text())
REQUESTS = [
    GenerationRequest(prompt_token_ids=(5, 9, 33, 2), max_tokens=6),
    GenerationRequest(prompt_token_ids=(7, 8, 60), max_tokens=0, echo_logprobs=True),
    GenerationRequest(
        prompt_token_ids=(1, 2, 3), max_tokens=4, temperature=0.8, top_p=0.9, seed=5, n=2
    ),
]


def write_model(folder):
    """A Llama of one layer whose every byte follows from this function."""
    from safetensors.numpy import save_file

    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
        "rope_theta": 10000.0, "eos_token_id": 0, "torch_dtype": "float16",
    }  # fmt: skip
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,),
        f"{layer}input_layernorm.weight": (32,), f"{layer}post_attention_layernorm.weight": (32,),
        f"{layer}self_attn.q_proj.weight": (32, 32), f"{layer}self_attn.k_proj.weight": (16, 32),
        f"{layer}self_attn.v_proj.weight": (16, 32), f"{layer}self_attn.o_proj.weight": (32, 32),
        f"{layer}mlp.gate_proj.weight": (64, 32), f"{layer}mlp.up_proj.weight": (64, 32),
        f"{layer}mlp.down_proj.weight": (32, 64),
    }  # fmt: skip
    words, tensors = np.random.Philox(key=17), {}
    for name, shape in shapes.items():
        uniform = (words.random_raw(int(np.prod(shape))) >> np.uint64(40)).astype(
            np.float64
        ) / 2**24 - 0.5
        values = uniform if len(shape) > 1 else 1 + uniform
        tensors[name] = (values * 0.6).astype(np.float16).reshape(shape)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    return folder


def test_labels_of_precisions_are_those_of_0_1_0():
    known = GOLDEN["precisions"]
    assert {
        name: [PRECISIONS[name].label, PRECISIONS[name].weights_label] for name in known
    } == known


def test_architecture_records_have_the_texts_of_0_1_0():
    """They are part of the fingerprint of dummy weights."""
    texts = {name: CATALOG[name].config.identity_text() for name in GOLDEN["specs"]}
    assert {
        name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()
    } == GOLDEN["specs"]


def test_engine_fingerprints_andrequest_keys_are_those_of_0_1_0(monkeypatch):
    import torch

    from flexgen_helm.engine import fingerprint as module

    # values have changed since, and texts have not
    monkeypatch.setattr(module, "RESULTS_VERSION", 4)
    checkpoint: Any = SimpleNamespace(
        fingerprint="w" * 64, config=CATALOG["opt-125m"].config, folder=None
    )
    tokenizer: Any = SimpleNamespace(fingerprint="t" * 64)
    on_cpu, on_gpu = (
        module.Arithmetic("cpu", str(torch.float32)),
        module.Arithmetic("cuda", str(torch.float16)),
    )
    assert (
        module.engine_fingerprint(checkpoint, None, EngineConfig(precision="4bit"), on_cpu)
        == GOLDEN["engine"]
    )
    assert (
        module.engine_fingerprint(checkpoint, tokenizer, EngineConfig(), on_gpu)
        == GOLDEN["engine_cuda"]
    )
    unverified = module.engine_fingerprint(
        checkpoint, None, EngineConfig(precision="4bit", unverified=True), on_cpu
    )
    assert unverified != GOLDEN["engine"]
    sampled = GenerationRequest(
        prompt_token_ids=(7,), max_tokens=0, temperature=0.7, top_p=0.9, seed=11, stop=("\n", "x"),
        n=3, echo_logprobs=True,
    )  # fmt: skip
    greedy = GenerationRequest(prompt_token_ids=(1, 2, 3), max_tokens=4)
    assert [request_key(greedy), request_key(sampled)] == GOLDEN["requests"]


@pytest.mark.parametrize(
    "change", [dict(theta=5e5), dict(kind="linear"), dict(dim=8), dict(truncate=False)]
)
def test_every_changed_value_changes_the_text(change):
    assert replace(RopeConfig(), **change).identity_text() != RopeConfig().identity_text()


@dataclass(frozen=True)
class Later(Identified, name="First", first_version="old_name=renamed"):
    """A record that had one field in its first version."""

    renamed: int
    added: float | None = None


def test_new_fields_count_only_where_they_say_something():
    assert Later(1).identity_text() == "First(old_name=1)"
    assert Later(1, 0.5).identity_text() == "First(old_name=1, added=0.5)"


@dataclass(frozen=True)
class Moved(
    Identified,
    name="First",
    first_version="gone old_name=renamed",
    later="old=new first",
    constants={"gone": "x"},
):
    """A record whose later fields were renamed and moved, and one of whose first is the same in
    all.
    """

    first: int = 0
    renamed: int = 1
    last: int = 0
    new: tuple[int, ...] = ()


def test_a_later_field_that_is_renamed_or_moved_keeps_its_name_and_place():
    assert Moved().identity_text() == "First(gone='x', old_name=1)"
    text = Moved(first=2, last=4, new=(3,)).identity_text()
    assert text == "First(gone='x', old_name=1, old=(3,), first=2, last=4)"


def test_values_without_a_text_of_their_own_are_refused():
    with pytest.raises(TypeError, match="Path has no text"):
        text_of((1, Later(1), Path("a")))
    with pytest.raises(TypeError, match="dict has no text"):
        text_of({})


@pytest.mark.parametrize("precision", ["fp16", "4bit", "paper-4bit"])
def test_what_0_1_0_wrote_is_reused(precision, tmp_path, monkeypatch):
    from flexgen_helm import Engine, Policy
    from flexgen_helm.engine import fingerprint as module
    from flexgen_helm.offload.offload_directory import WeightFiles
    from flexgen_helm.offload.weights_at_rest import WeightsAtRest

    monkeypatch.setattr(module, "RESULTS_VERSION", 4)
    with zipfile.ZipFile(DATA / "written_by_0_1_0.zip") as file:
        file.extractall(tmp_path / "written")
    model, offload = write_model(tmp_path / "model"), tmp_path / "written/offload"
    monkeypatch.setattr(
        WeightFiles, "_write", lambda *_: pytest.fail("weights of 0.1.0 were written again")
    )
    monkeypatch.setattr(WeightsAtRest, "rows_of", lambda *_: ())  # as from another disk
    policy = Policy(4, 1, wg=0, wc=0, cg=0, cc=1, hg=0, hc=1)  # all weights on the disk
    with Engine.from_pretrained(
        model, precision=precision, policy=policy, offload_dir=offload, device="cpu"
    ) as engine:
        computed = engine.run(REQUESTS)
        path = response_cache_path(tmp_path / "written/home", engine.fingerprint)
    assert path.is_file(), "the engine has another fingerprint"
    with closing(ResponseCache(path)) as journal:
        cached = journal.get_many(map(request_key, REQUESTS))
    for request, result in zip(REQUESTS, computed):
        was = cached[request_key(request)]
        if request.temperature == 0.0:  # other tokens are sampled today, by Gumbel noise
            assert [c.token_ids for c in was.completions] == [
                c.token_ids for c in result.completions
            ]
            for before, now in zip(was.completions, result.completions):
                assert now.logprobs == pytest.approx(before.logprobs, abs=1e-5)
        if request.echo_logprobs:
            assert was.prompt_logprobs is not None and result.prompt_logprobs is not None
            assert result.prompt_logprobs[1:] == pytest.approx(was.prompt_logprobs[1:], abs=1e-5)


def test_a_model_of_other_bytes_does_not_reuse_them(tmp_path, monkeypatch):
    """The inverse: the guard of the test above can fail."""
    from flexgen_helm import Engine, Policy
    from flexgen_helm.offload.offload_directory import WeightFiles
    from flexgen_helm.offload.weights_at_rest import WeightsAtRest

    with zipfile.ZipFile(DATA / "written_by_0_1_0.zip") as file:
        file.extractall(tmp_path / "written")
    model = write_model(tmp_path / "model")
    with (model / "config.json").open("a") as file:
        file.write("\n")
    monkeypatch.setattr(
        WeightFiles, "_write", lambda *_: (_ for _ in ()).throw(RuntimeError("written again"))
    )
    monkeypatch.setattr(WeightsAtRest, "rows_of", lambda *_: ())
    policy = Policy(4, 1, wg=0, wc=0, cg=0, cc=1, hg=0, hc=1)
    with pytest.raises(RuntimeError, match="written again"):
        Engine.from_pretrained(
            model, policy=policy, offload_dir=tmp_path / "written/offload", device="cpu"
        )


def _change_json(folder, name, **changes):
    content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps({**content, **changes}))


# By file: a change of it that can change an answer. `transformers` reads a template of the name
# 'default' there.
CHANGES: dict[str, Any] = {
    "config.json": lambda folder: _change_json(folder, "config.json", rms_norm_eps=1e-3),
    "generation_config.json": lambda folder: _change_json(
        folder, "generation_config.json", eos_token_id=[7]
    ),
    "model.safetensors": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-1] + b"\x30"
    ),
    "tokenizer.json": lambda folder: _change_json(
        folder, "tokenizer.json", normalizer={"type": "Lowercase"}
    ),
    "tokenizer_config.json": lambda folder: _change_json(
        folder, "tokenizer_config.json", bos_token="a"
    ),
    "special_tokens_map.json": lambda folder: _change_json(
        folder, "special_tokens_map.json", unk_token="b"
    ),
    "added_tokens.json": lambda folder: _change_json(folder, "added_tokens.json", ab=301),
    "chat_template.jinja": lambda folder: (folder / "chat_template.jinja").write_text("another"),
    "additional_chat_templates/default.jinja": lambda folder: (
        folder / "additional_chat_templates/default.jinja"
    ).write_text("another"),
    "vocab.json": lambda folder: _change_json(folder, "vocab.json", the=300),
    "merges.txt": lambda folder: (folder / "merges.txt").write_text("#version: 0.2\n"),
}


_OPENED, _IS_FOLDER = 0x20, 0x40000000  # IN_OPEN, IN_ISDIR
_EVENT = struct.Struct("iIII")


@contextmanager
def opened_files(folder):
    """Fill the set, at the end, with the paths below `folder` of the files that were opened
    meanwhile, by whatever library: the kernel tells (inotify).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    try:
        folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        watched = {
            libc.inotify_add_watch(descriptor, os.fsencode(path), _OPENED): path for path in folders
        }
        assert min(watched) >= 0, os.strerror(ctypes.get_errno())
        found = set()
        yield found
        events = os.read(descriptor, 1 << 20)
        while events:
            watch, kind, _, length = _EVENT.unpack_from(events)
            name = events[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
            events = events[_EVENT.size + length :]
            if not kind & _IS_FOLDER:
                found.add(str((watched[watch] / os.fsdecode(name)).relative_to(folder)))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "form, weights",
    [("tokenizer.json", "pretrained"), ("vocab.json", "pretrained"), ("vocab.json", "dummy")],
)
def test_every_file_that_is_opened_is_in_the_fingerprint(form, weights, tmp_path, monkeypatch):
    from flexgen_helm import Engine

    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    folder = write_model(tmp_path / "model")
    save_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    for name in ("generation_config.json", "special_tokens_map.json", "added_tokens.json"):
        (folder / name).write_text("{}")
    for name in ("chat_template.jinja", "additional_chat_templates/default.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("a template")
    if form == "vocab.json":
        (folder / "tokenizer.json").unlink()
        _change_json(folder, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    # Files of other libraries and of other models, of which none may be read unseen.
    for name in ("processor_config.json", "chat_template.json", "spiece.model", "vocab.txt"):
        (folder / name).write_text("{}")

    def fingerprint():
        with Engine.from_pretrained(folder, weights=weights) as engine:
            return engine.fingerprint

    with opened_files(folder) as opened:
        before = fingerprint()
    assert opened >= {"config.json", "generation_config.json", "tokenizer_config.json", form}
    # The identity of dummy weights is not that of the files: what another file overrides is not in
    # it.
    overridden = {
        "chat_template.jinja",
        *(("vocab.json", "merges.txt") if form == "tokenizer.json" else ()),
    }
    ignored = overridden if weights == "dummy" else set()
    same = []
    for name in sorted(opened - ignored):
        content = (folder / name).read_bytes()
        CHANGES[name](folder)
        if fingerprint() == before:
            same.append(name)
        (folder / name).write_bytes(content)
    assert not same
    assert fingerprint() == before
