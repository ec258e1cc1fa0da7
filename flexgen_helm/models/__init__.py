"""The mathematics of decoders, driven by one `ModelConfig` per model; no I/O, no placement."""
