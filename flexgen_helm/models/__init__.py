"""The mathematics of decoders, driven by one declarative record per family; no I/O, no placement."""
