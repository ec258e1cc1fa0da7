"""llama.cpp with memory mapping as a peer of `bench experts`: a GGUF file of the same shapes, and its own benchmark.

`llama-batched-bench`, one of llama.cpp's programs, decodes blocks of any number of sequences; it must be in PATH.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import psutil

from flexgen_helm.benchmarks.common import run_logged
from flexgen_helm.benchmarks.memory_group import MemoryGroup

PROGRAM = "llama-batched-bench"
_ARCHITECTURE = "qwen3moe"


def missing() -> str | None:
    """Say why this peer cannot be measured here; None if it can."""
    return None if which(PROGRAM) else f"{PROGRAM} is not in PATH"


def version(program: Sequence[str] = (PROGRAM,)) -> str:
    done = subprocess.run([*program, "--version"], capture_output=True, text=True)
    return (done.stderr + done.stdout).partition("\n")[0].removeprefix("version: ")


def write_gguf(model: str, file: str) -> dict[str, Any]:
    """Write random weights in 16 bits for the `config.json` of a folder of a Qwen3-MoE model.

    All matrices of a shape have the same values: the time of a product does not depend on them.
    """
    import gguf

    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, _ARCHITECTURE)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    shapes = dict(_shapes(config))
    for name, (shape, dtype) in shapes.items():
        writer.add_tensor_info(name, shape, np.dtype(dtype), int(np.prod(shape)) * np.dtype(dtype).itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for shape, dtype in shapes.values():
        one = random.standard_normal(shape[-2:], dtype=np.float32) * 0.02 + (len(shape) == 1)
        writer.write_tensor_data(np.broadcast_to(one.astype(dtype), shape).copy())
    writer.close()
    return {"bytes": Path(file).stat().st_size}


def decode_pass_s(file: Path, block: tuple[int, int, int], group: MemoryGroup | None, scratch: Path) -> float:
    """Return the seconds of a decode pass for a block of (sequences, prompt, output) tokens.

    Raises `ProcessKilled` if the group's memory does not suffice.
    """
    rows, prompt, output = block
    log = scratch / "llama_cpp.txt"
    context, threads = max(512, rows * (prompt + output)), psutil.cpu_count(logical=False) or 1
    command = [
        PROGRAM, "-m", str(file), "-c", str(context), "-b", "512", "-ub", "512", "-npp", str(prompt), "-ntg",
        str(output), "-npl", str(rows), "-t", str(threads), "-lm", "mmap", "--output-format", "jsonl",
    ]  # fmt: skip
    run_logged(command if group is None else group.enter(command), log, PROGRAM)
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return float(json.loads(lines[-1])["t_tg"]) / output


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    keys, experts, inner = config["num_key_value_heads"], config["num_experts"], config["moe_intermediate_size"]
    yield "token_embd.weight", ((config["vocab_size"], hidden), "float16")
    for layer in range(config["num_hidden_layers"]):
        for name, shape, dtype in (
            ("attn_norm", (hidden,), "float32"),
            ("attn_q", (heads * dim, hidden), "float16"),
            ("attn_k", (keys * dim, hidden), "float16"),
            ("attn_v", (keys * dim, hidden), "float16"),
            ("attn_output", (hidden, heads * dim), "float16"),
            ("attn_q_norm", (dim,), "float32"),
            ("attn_k_norm", (dim,), "float32"),
            ("ffn_norm", (hidden,), "float32"),
            ("ffn_gate_inp", (experts, hidden), "float32"),
            ("ffn_gate_exps", (experts, inner, hidden), "float16"),
            ("ffn_up_exps", (experts, inner, hidden), "float16"),
            ("ffn_down_exps", (experts, hidden, inner), "float16"),
        ):
            yield f"blk.{layer}.{name}.weight", (shape, dtype)
    yield "output_norm.weight", ((hidden,), "float32")
