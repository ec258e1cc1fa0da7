"""Loops that no library has, compiled by numba for the host's processor; without them PyTorch
computes the same, more slowly.
"""
