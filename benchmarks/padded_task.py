"""`transformers` alone with padded batches: what most people would write."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks.process import in_own_process


def padded(model: Path, requests: Sequence[Mapping[str, Any]], batch: int) -> float:
    """Return the seconds of a process that answers HELM's greedy requests with the `transformers` folder `model`."""
    prompts = [(request["prompt"], request["max_tokens"]) for request in requests]
    began = time.perf_counter()
    in_own_process(padded_batches, {"folder": str(model), "prompts": prompts, "batch": batch})
    return time.perf_counter() - began


def padded_batches(*, folder: str, prompts: Sequence[tuple[str, int]], batch: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    lengths = [len(ids) for ids in tokenizer([text for text, _ in prompts])["input_ids"]]
    order = sorted(range(len(prompts)), key=lambda i: -lengths[i])  # least padding
    with torch.inference_mode():
        for first in range(0, len(order), batch):
            texts, max_tokens = zip(*(prompts[i] for i in order[first : first + batch]))
            model.generate(
                **tokenizer(list(texts), return_tensors="pt", padding=True),
                max_new_tokens=max(1, *max_tokens),
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
    return {}
