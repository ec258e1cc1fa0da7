"""Model folders and files of a stranger: each opens, or is refused in one sentence; nothing runs,
grows or is written.

The files' bytes are damaged at random in tests/checkpoint; here they are well-formed and lie.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.errors import CheckpointError, FlexgenError
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.hostile import MIB, Violation, contained
from tests.helpers.shares import share_of
from tests.helpers.tiny_models import save_tokenizer

JUNK: list[Any] = [
    None, True, False, -1, 0, 3, 10**12, 10**30, 1.5, -0.5, float("nan"), float("inf"), "", "x", [], [1], [None],
    [["a"]], [10**12] * 3, {}, {"a": 1},
]  # fmt: skip
TOKENIZER_CONFIG, CONFIG = "tokenizer_config.json", "config.json"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of a Llama that a test may spoil."""
    return Path(shutil.copytree(tiny("llama").path, tmp_path / "model"))


def use(path: Path) -> None:
    """Do with a model what a run does."""
    with Engine.from_pretrained(path) as engine:
        prompt = (
            {"prompt": "the quick fox"}
            if engine.tokenizer is not None
            else {"prompt_token_ids": [5, 6]}
        )
        for result in engine.run([GenerationRequest(max_tokens=2, echo_logprobs=True, **prompt)]):
            if result.error is not None:
                raise result.error


@pytest.fixture(autouse=True, scope="module")
def imported(tiny):
    """What is imported and started at first use is nobody's growth."""
    use(tiny("llama").path)


# The guard itself


def test_the_guard_notices_what_it_is_for(tmp_path):
    with pytest.raises(Violation, match="open .*elsewhere"), contained(tmp_path / "allowed"):
        (tmp_path / "elsewhere").write_text("")
    with pytest.raises(Violation, match="os.system"), contained(tmp_path):
        os.system("true")
    with pytest.raises(MemoryError), contained(tmp_path):
        bytearray(2048 * MIB)
    with pytest.raises(KeyError), contained(tmp_path):
        raise KeyError("no error of ours")
    with contained(tmp_path) as caught:
        (tmp_path / "allowed").write_text("")
        raise CheckpointError("ours")
    assert len(caught) == 1


# config.json and the tokenizer's files


def paths(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of a JSON object, at any depth; the first few of a vocabulary."""
    for key in list(content)[:25]:
        yield (*before, key)
        if isinstance(content[key], dict):
            yield from paths(content[key], (*before, key))


# Keys that a file may have though the tiny models' do not.
OTHER_KEYS = [
    "text_config", "auto_map", "rope_scaling", "quantization_config", "sliding_window",
    "layer_types", "head_dim", "rope_parameters", "rope_theta", "partial_rotary_factor",
    "eos_token_id", "bos_token_id", "chat_template", "added_tokens_decoder", "tokenizer_class",
    "extra_special_tokens", "model_max_length", "num_local_experts",
]  # fmt: skip
LIARS = [
    (variant, CONFIG)
    for variant in ("llama", "gemma3", "mixtral", "qwen3-moe", "phi3-longrope", "opt", "bloom")
]
LIARS += [
    ("llama", name) for name in (TOKENIZER_CONFIG, "tokenizer.json", "generation_config.json")
]


def lies(content: dict[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    keys = dict.fromkeys([*paths(content), *((key,) for key in OTHER_KEYS)])
    return [(path, junk) for path in keys for junk in JUNK]


def told(content: dict[str, Any], path: tuple[Any, ...], junk: Any) -> str:
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    return json.dumps(content)


@settings(max_examples=share_of(12, 3))
@given(data=st.data())
@pytest.mark.parametrize("variant, name", LIARS)
def test_an_entry_that_lies_is_refused_or_harmless(tiny, tmp_path, home, variant, name, data):
    folder = tmp_path / "model"
    if not folder.exists():
        shutil.copytree(tiny(variant).path, folder)
    original = (
        (tiny(variant).path / name).read_text() if (tiny(variant).path / name).exists() else "{}"
    )
    path, junk = data.draw(st.sampled_from(lies(json.loads(original))))
    (folder / name).write_text(told(json.loads(original), path, junk))
    with contained(home, folder):
        use(folder)


# What a random draw would seldom meet: numbers that ask for memory or time.
BOMBS = [
    ("qwen3-moe", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ("mixtral", {"num_local_experts": 10**9}, "1000000000 experts"),
    ("llama", {"num_hidden_layers": 10**9}, "num layers is 1000000000"),
    ("pythia", {"rotary_pct": 1e9, "rope_parameters": None}, "turns 16000000000 of 16 elements"),
    ("llama", {"rms_norm_eps": float("nan")}, "norm eps is nan"),
    ("llama", {"text_config": "x"}, "text_config"),
    ("llama", {"architectures": [None, 3]}, "None, 3 is not supported"),
    ("qwen3-moe", {"num_experts_per_tok": 10**9}, "1000000000 of 8 experts"),
    ("phi3-longrope", {"rope_scaling": [1]}, "wrong kind"),
]


@pytest.mark.parametrize("variant, changes, message", BOMBS)
def test_a_number_that_asks_for_memory_or_time_is_refused(
    tiny, tmp_path, home, variant, changes, message
):
    folder = Path(shutil.copytree(tiny(variant).path, tmp_path / "model"))
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, **changes}))
    with contained(home, memory=256 * MIB) as caught:
        use(folder)
    (error,) = caught
    assert message in str(error) and error.exit_code == 2


# Files that are none


@pytest.mark.parametrize(
    "name, kind",
    [
        (CONFIG, "pipe"),
        (CONFIG, "huge"),
        (TOKENIZER_CONFIG, "device"),
        ("special_tokens_map.json", "folder"),
    ],
)
def test_what_reading_would_never_end_is_refused(folder, home, name, kind):
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    else:
        with file.open("wb") as opened:
            opened.truncate(20 << 30)
    with contained(home) as caught:
        use(folder)
    assert isinstance(caught[0], CheckpointError) and name in str(caught[0])


def test_links_are_followed_to_weights_and_never_shown(folder, home, tmp_path):
    """A hub snapshot consists of links. One that leads to a secret is no model file, and its
    content is not quoted.
    """
    secret = tmp_path / "secret"
    secret.write_text("hunter2 " * 20)
    for name in ("model.safetensors", CONFIG, "tokenizer.json"):
        copy_of = Path(shutil.copytree(folder, tmp_path / name))
        (copy_of / name).unlink()
        (copy_of / name).symlink_to(secret)
        with contained(home) as caught:
            use(copy_of)
        assert isinstance(caught[0], CheckpointError) and "hunter2" not in str(caught[0])


# safetensors


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F16", shape: Any = (2, 2), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DECEITS: dict[str, bytes] = {
    "header of 2^63 bytes": safetensors({}, length=2**63),
    "header beyond the end": safetensors({}, length=10**6),
    "header of 200 MB": safetensors(b"{" + b" " * (200 << 20)),
    "deep": safetensors(b'{"a":' * 20_000),
    "overlap": safetensors({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "hole": safetensors({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)),
    "backwards": safetensors({"a": entry(offsets=(8, 0))}, bytes(8)),
    "beyond": safetensors({"a": entry(offsets=(0, 2**40))}, bytes(8)),
    "overflow": safetensors({"a": entry(shape=(2**32, 2**32))}, bytes(8)),
    "unknown type": safetensors({"a": entry("F17")}, bytes(8)),
    "name twice": safetensors(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "empty": b"",
    "many tensors of nothing": safetensors(
        {f"t{i}": entry(shape=(0,), offsets=(0, 0)) for i in range(10_000)}
    ),
}


@pytest.mark.parametrize("content", DECEITS.values(), ids=DECEITS)
def test_a_header_that_lies_is_refused(folder, home, content):
    (folder / "model.safetensors").write_bytes(content)
    with contained(home, memory=1024 * MIB) as caught:
        use(folder)
    assert isinstance(caught[0], CheckpointError) and "model" in str(caught[0])


INDEXES: dict[str, Any] = {
    "a file of the system": "/etc/passwd",
    "above": "../../secret",
    "a name with a zero": "a\0b",
    "the folder": ".",
    "a number": 3,
}


@pytest.mark.parametrize("shard", INDEXES.values(), ids=INDEXES)
def test_an_index_that_lies_is_refused(folder, home, shard):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": shard}})
    )
    with contained(home) as caught:
        use(folder)
    assert isinstance(caught[0], CheckpointError)


# GGUF

MAGIC = b"GGUF" + struct.pack("<I", 3)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


STRING, ARRAY = 8, 9
GGUF_DECEITS: dict[str, bytes] = {
    "nested arrays": MAGIC + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<I", ARRAY)
    + struct.pack("<IQ", ARRAY, 1) * 50_000 + bytes(64),
    "2^63 tensors": MAGIC + struct.pack("<QQ", 2**63, 0) + bytes(4096),
    "2^62 strings": MAGIC + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", ARRAY, STRING, 2**62)
    + bytes(4096),
    "an unknown type": MAGIC + struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<I", 77) + bytes(4096),
    "alignment 2^63": MAGIC + struct.pack("<QQ", 0, 1) + text(b"general.alignment") + struct.pack("<IQ", 10, 2**63)
    + bytes(4096),
    "an endless tensor": MAGIC + struct.pack("<QQ", 1, 0) + text(b"a") + struct.pack("<I4QIQ", 4, *[2**60] * 4, 1, 0)
    + bytes(4096),
    "five dimensions": MAGIC + struct.pack("<QQ", 1, 0) + text(b"a") + struct.pack("<I", 5) + bytes(4096),
    "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("content", GGUF_DECEITS.values(), ids=GGUF_DECEITS)
def test_a_gguf_file_that_lies_is_refused(tmp_path, home, content):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with contained(home) as caught:
        use(file)
    assert isinstance(caught[0], FlexgenError) and caught[0].exit_code == 2


VOCABULARY_LIES: list[tuple[str, Any]] = [
    ("tokenizer.ggml.model", ["gpt2"]),
    ("tokenizer.ggml.eos_token_id", 10**12),
    ("tokenizer.ggml.tokens", ["a" * 5000, "b"]),
    ("tokenizer.ggml.merges", ["a", "a b c"]),
    ("tokenizer.chat_template", 3),
]


@pytest.mark.parametrize("key, value", VOCABULARY_LIES)
def test_a_vocabulary_that_lies_is_refused(tmp_path, home, key, value, monkeypatch):
    from flexgen_helm.tokenizer import gguf_tokenizer

    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1, 1],
        "tokenizer.ggml.merges": [], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1, key: value,
    }  # fmt: skip
    header = type("Header", (), {"metadata": metadata})
    monkeypatch.setattr(gguf_tokenizer, "read_gguf_header", lambda path: header)
    with contained(home) as caught:
        gguf_tokenizer.read_gguf_tokenizer(tmp_path / "model.gguf")
    assert isinstance(caught[0], CheckpointError)


# Weights


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_is_refused_by_name(folder, home, value):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = value
    save_file(tensors, folder / "model.safetensors")
    with contained(home) as caught:
        use(folder)
    assert "model.layers.1.mlp.up_proj.weight" in str(caught[0]) and "not finite" in str(caught[0])


def test_the_guard_is_what_keeps_such_a_weight_out(folder, monkeypatch):
    """The inverse: without the check a model with one infinite weight is loaded, and its answers
    fail or are wrong.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7, 2] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr(
        "flexgen_helm.checkpoint.checkpoint.Checkpoint._require_finite", lambda *_: None
    )
    assert not torch.isfinite(open_checkpoint(folder).tensor("embed.tokens.weight")).all()


# The tokenizer's own traps


def test_a_pattern_that_gives_up_fails_its_text_alone(tmp_path, home):
    """`(a+)+$` takes for ever; the library's engine gives up with a panic, which is no
    `Exception`.
    """
    save_tokenizer(tmp_path / "m")
    content = json.loads((tmp_path / "m" / "tokenizer.json").read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "^(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, content["pre_tokenizer"]],
    }
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_path(tmp_path / "m")
    assert tokenizer is not None and tokenizer.encode("the fox")
    with contained(home) as caught:
        tokenizer.encode("a" * 40 + "!")
    assert "the tokenizer fails on a text" in str(caught[0])
    assert tokenizer.encode("the fox")
