"""Schedules, the executor that interprets them, sampling, the journal, and Engine."""
