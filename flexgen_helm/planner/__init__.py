"""Decide placement and batching; predict how long a run takes. No torch."""
