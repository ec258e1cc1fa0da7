"""The mathematics of decoders, driven by one record per model; no I/O, no placement."""
