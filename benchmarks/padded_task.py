"""`transformers` alone with padded batches, in a process of its own: what most people would write.

python -m flexgen_helm.benchmarks.padded_task FOLDER PROMPTS.json BATCH
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks.common import run_logged


def padded(model: Path, requests: Sequence[Mapping[str, Any]], batch: int, scratch: Path) -> float:
    """Return the seconds of a process that answers HELM's greedy requests with the `transformers` folder `model`."""
    prompts = scratch / "prompts.json"
    prompts.write_text(json.dumps([[r["prompt"], r["max_tokens"]] for r in requests]), encoding="utf-8")
    command = [sys.executable, "-m", __name__, str(model), str(prompts), str(batch)]
    return run_logged(command, scratch / "padded.txt", "transformers in padded batches")


def main(folder: str, prompts: str, batch: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    requests = json.loads(Path(prompts).read_text(encoding="utf-8"))
    lengths = [len(ids) for ids in tokenizer([text for text, _ in requests])["input_ids"]]
    order = sorted(range(len(requests)), key=lambda i: -lengths[i])  # least padding
    with torch.inference_mode():
        for first in range(0, len(order), batch):
            texts, max_tokens = zip(*(requests[i] for i in order[first : first + batch]))
            model.generate(
                **tokenizer(list(texts), return_tensors="pt", padding=True),
                max_new_tokens=max(1, *max_tokens),
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
