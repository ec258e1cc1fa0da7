"""Decisions: validated placement fractions and how many sequences form a block. No torch."""
