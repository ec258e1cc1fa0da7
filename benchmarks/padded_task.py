"""Prompts through `transformers` by itself in padded batches, in a process of its own: what most people would write.

python -m flexgen_helm.benchmarks.padded_task FOLDER PROMPTS.json BATCH
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexgen_helm.errors import FlexgenError


def padded(model: Path, requests: Sequence[Mapping[str, Any]], batch: int, scratch: Path) -> float:
    """Seconds of the whole process for greedy requests (HELM's, as JSON) on the `transformers` folder `model`."""
    file = scratch / "prompts.json"
    file.write_text(json.dumps([[r["prompt"], r["max_tokens"]] for r in requests]), encoding="utf-8")
    command = [sys.executable, "-m", __name__, str(model), str(file), str(batch)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise FlexgenError(f"transformers in padded batches failed: {done.stderr.strip()[-500:]}")
    return time.perf_counter() - began


def main(folder: str, prompts: str, batch: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    asked = json.loads(Path(prompts).read_text(encoding="utf-8"))
    lengths = [len(ids) for ids in tokenizer([text for text, _ in asked])["input_ids"]]
    order = sorted(range(len(asked)), key=lambda place: -lengths[place])  # least padding
    with torch.inference_mode():
        for first in range(0, len(order), batch):
            some = [asked[place] for place in order[first : first + batch]]
            inputs = tokenizer([text for text, _ in some], return_tensors="pt", padding=True)
            model.generate(
                **inputs,
                max_new_tokens=max(1, max(count for _, count in some)),
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
