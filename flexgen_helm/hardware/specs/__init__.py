"""Profiles of known machines, a JSON file each, with the source of every figure."""
