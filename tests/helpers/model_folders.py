"""Folders of small Llamas without `transformers`, and changes of a model's folder."""

import json
import os
import time

import torch
from safetensors.torch import load_file, save_file

from flexgen_helm.models.architectures import ARCHITECTURES
from flexgen_helm.models.architectures.base import find_source
from flexgen_helm.models.config import tensor_shapes

SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 31,
    "max_position_embeddings": 16, "tie_word_embeddings": True,
}  # fmt: skip


def published_name(name):
    """Return the name in published checkpoints of Llamas of a tensor of ours."""
    found = find_source(ARCHITECTURES["llama"].tensors, name).name
    return found if found.startswith("lm_head") else f"model.{found}"


def llama_tensors(config=SMALL_LLAMA, seed=0):
    """A random Llama under the names of its published checkpoints; a tied head is not among
    them.
    """
    torch.manual_seed(seed)
    shapes = tensor_shapes(ARCHITECTURES["llama"].read_config(config))
    return {
        published_name(name): torch.randn(shape, dtype=torch.float16)
        for name, shape in shapes.items()
    }


def write_weights(folder, tensors, save, name, shards):
    """Save tensors as the file `name`, or as so many shards with an index."""
    if shards == 1:
        return save(tensors, folder / name)
    stem, ending = name.rsplit(".", 1)
    files = [f"{stem}-{i + 1:05}-of-{shards:05}.{ending}" for i in range(shards)]
    weight_map = {tensor: files[i * shards // len(tensors)] for i, tensor in enumerate(tensors)}
    for file in files:
        save(
            {tensor: tensors[tensor] for tensor in tensors if weight_map[tensor] == file},
            folder / file,
        )
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def age(folder):
    """Make files old enough for their hashes to be remembered."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - 60, time.time() - 60))


def edit_weights(folder, change):
    """Let `change` edit the tensors of the one safetensors file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
