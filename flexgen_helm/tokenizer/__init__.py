"""Tokenizers, byte-exact token texts, stop strings."""
