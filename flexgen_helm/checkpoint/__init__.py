"""From a model name to verified tensors: catalog, hub, wheel, safetensors, GGUF, dummy weights."""
