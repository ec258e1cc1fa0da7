"""Models that run by `transformers`' own modules, one decoder layer at a time.

docs/explanation/transformers-backend.md explains how.
"""
