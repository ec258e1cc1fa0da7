"""Tensors at rest: tiers with byte limits, weights and KV cache."""
