"""Checkpoints that other tools quantized: each set of stored tensors is read as one floating-point
tensor.
"""
