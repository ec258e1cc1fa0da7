"""Tokenizers, chat templates, byte-exact token texts, stop strings, thinking."""

# What templates get as today's date: prompts must not change from day to day. Llama's own templates
# fall back to it.
DATE = "2024-07-26"
