"""`Engine`: the executor's loop, attention metadata, sampling, run records, and the proof of a
model.
"""
