"""`transformers` with Accelerate's disk offload on the same shapes: what a measurement's own process runs."""

from __future__ import annotations

import resource
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks.engine_task import prompts

# Its best: freed weights go back to the system. By default glibc keeps more and more of them, and at 2 GiB the kernel
# ends the process, at any batch size.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "1000000"}


def missing() -> str | None:
    """Why this cannot run here; None where it can."""
    absent = [package for package in ("transformers", "accelerate") if find_spec(package) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def write_weights(*, model: str, folder: str) -> dict[str, Any]:
    """Random float32 weights of the model's shapes in Accelerate's own format."""
    import torch
    from accelerate.utils import offload_state_dict

    built = _model(model, "cpu")
    with torch.no_grad():
        offload_state_dict(folder, built.state_dict())
    return {"parameters": sum(parameter.numel() for parameter in built.parameters())}


def generate(*, model: str, folder: str, rows: int, prompt: int, output: int) -> dict[str, Any]:
    """Greedy generation with all weights on the disk, float32, the second time: the first pays for fresh memory."""
    import torch
    from accelerate import disk_offload

    built = _model(model, "meta")
    assert (Path(folder) / "index.json").is_file()
    disk_offload(built, folder, execution_device=torch.device("cpu"))

    def run(count: int, length: int, tokens: int) -> float:
        ids = torch.tensor(prompts(count, length, built.config.vocab_size))
        began = time.perf_counter()
        with torch.no_grad():
            found = built.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
            )
        assert found.shape[1] == length + tokens
        return time.perf_counter() - began

    run(rows, prompt, output)
    return {
        "latency_s": run(rows, prompt, output),
        "rows": rows,
        "prompt_tokens": rows * prompt,
        "output_tokens": rows * output,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _model(name: str, device: str) -> Any:
    """Of an OPT in the catalogue, in float32; on 'meta' it has shapes and no weights."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    from flexgen_helm.checkpoint.open import open_checkpoint

    model_config = open_checkpoint(name, weights="dummy").config
    assert model_config.architecture == "opt", f"{name} is no OPT"
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
