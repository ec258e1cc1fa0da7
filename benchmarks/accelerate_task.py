"""`transformers` with Accelerate's disk offload on the same shapes: what a measurement's own
process runs.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks.engine_task import prompts, run_sizes

# The best setting for Accelerate: freed weights go back to the system. With glibc's default, which
# keeps them, the kernel ends the process at 2 GiB for any batch size.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "1000000"}


def missing() -> str | None:
    """Return why Accelerate cannot run here; None if it can."""
    return "not installed: accelerate" if find_spec("accelerate") is None else None


def write_weights(*, model: str, folder: str) -> dict[str, Any]:
    """Write random float32 weights of the model's shapes in Accelerate's own format."""
    import torch
    from accelerate.utils import offload_state_dict

    built = _model(model, "cpu")
    with torch.no_grad():
        offload_state_dict(folder, built.state_dict())
    return {"parameters": sum(parameter.numel() for parameter in built.parameters())}


def generate(*, model: str, folder: str, rows: int, prompt: int, output: int) -> dict[str, Any]:
    """Generate greedily in float32 with all weights on disk, twice; the first run pays for touching
    its memory.
    """
    import torch
    from accelerate import disk_offload

    built = _model(model, "meta")
    assert (Path(folder) / "index.json").is_file()
    disk_offload(built, folder, execution_device=torch.device("cpu"))
    ids = torch.tensor(prompts(rows, prompt, built.config.vocab_size))
    _seconds(built, ids, output)
    return {"latency_s": _seconds(built, ids, output), **run_sizes(rows, prompt, output)}


def _seconds(built: Any, ids: Any, tokens: int) -> float:
    """Return the seconds of so many new tokens behind each of the prompts."""
    import torch

    synchronize = torch.cuda.synchronize if ids.is_cuda else lambda: None
    synchronize()
    began = time.perf_counter()
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    with torch.no_grad():
        answers = built.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths
        )
    synchronize()
    assert answers.shape[1] == ids.shape[1] + tokens
    return time.perf_counter() - began


def generate_on_gpu(
    *, model: str, gpu_bytes: int | None, rows: int, prompt: int, output: int
) -> dict[str, Any]:
    """Generate greedily in float16, all on the GPU, or with the layers that fit into `gpu_bytes`
    there.

    The largest batch that fits, up to `rows`, is found by halving. Half of `gpu_bytes` is left for
    caches and products.
    The time of `output` tokens follows from those of 1 and of 3, because a token may take seconds
    behind a link.
    """
    import torch

    device = "cuda" if gpu_bytes is None else "cpu"
    built = _model(model, "meta").half().to_empty(device=device)
    with torch.no_grad():
        for parameter in built.parameters():  # drawing billions on a processor takes minutes
            parameter.normal_(0, 0.02) if gpu_bytes is None else parameter.fill_(0.01)
    built.tie_weights()
    if gpu_bytes is not None:
        from accelerate import dispatch_model, infer_auto_device_map

        memory: dict[int | str, int | str] = {0: gpu_bytes // 2, "cpu": 1 << 40}
        layers = infer_auto_device_map(
            built, max_memory=memory, no_split_module_classes=["OPTDecoderLayer"]
        )
        built = dispatch_model(built, layers)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_bytes / total))
    ids = torch.tensor(prompts(rows, prompt, built.config.vocab_size), device="cuda")

    size = rows
    while True:
        try:
            _seconds(built, ids[:size], 1)  # warm
            prefill_s, longer_s = _seconds(built, ids[:size], 1), _seconds(built, ids[:size], 3)
            break
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            size //= 2
            torch.cuda.empty_cache()
    decode_s = (output - 1) * (longer_s - prefill_s) / 2
    seconds = {"latency_s": prefill_s + decode_s, "prefill_s": prefill_s, "decode_s": decode_s}
    return {**seconds, **run_sizes(size, prompt, output)}


def _model(name: str, device: str) -> Any:
    """Build a catalog's OPT in float32; on 'meta' it has shapes and no weights."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    from flexgen_helm.checkpoint.open import open_checkpoint
    from flexgen_helm.models.decoder_config import DecoderConfig

    model_config = open_checkpoint(name, weights="dummy").config
    assert isinstance(model_config, DecoderConfig) and model_config.architecture == "opt", (
        f"{name} is no OPT"
    )
    config = OPTConfig(
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.hidden_size,
        num_hidden_layers=model_config.num_layers,
        ffn_dim=model_config.ffn_size,
        num_attention_heads=model_config.num_heads,
        max_position_embeddings=model_config.max_positions,
        word_embed_proj_dim=model_config.embed_size,
        do_layer_norm_before=model_config.residual == "pre_norm",
        dropout=0.0,
    )
    with torch.device(device):
        built: Any = OPTForCausalLM(config).eval()  # in torch's default type, float32
    built.tie_weights()
    return built
