"""Evaluate a checkpoint of your own under plain `helm-run`.

    python examples/own_checkpoint.py /path/to/checkpoint

The checkpoint is a folder with config.json, safetensors files, and a tokenizer (what
`save_pretrained` writes), or a .gguf file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml


def main(checkpoint: str) -> None:
    # A name for the checkpoint. Each entry is a path, or a path with arguments of the engine.
    models = Path("my_models.yaml")
    models.write_text(
        yaml.safe_dump({"mine": {"path": str(Path(checkpoint).resolve()), "precision": "fp16"}})
    )

    # helm-run finds the plugin by itself; the variable tells the plugin where the names are.
    subprocess.run(
        [
            "helm-run",
            "-r",
            "simple_mcqa:model=flexgen/mine",
            "--suite",
            "own-checkpoint",
            "-m",
            "10",
        ],
        env={**os.environ, "FLEXGEN_HELM_MODELS": str(models.resolve())},
        check=True,
    )
    print(f"results are in {Path('benchmark_output/runs/own-checkpoint').resolve()}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
