"""Models that run by `transformers`' own modules, one decoder layer at a time (docs/explanation/generic-models.md)."""
