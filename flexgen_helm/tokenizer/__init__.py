"""Tokenizers, chat templates, byte-exact token texts, stop strings, thinking."""
