"""Requests in, results out, for any harness: one queue, one model in memory, a response cache."""
