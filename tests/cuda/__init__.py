"""A CUDA device in host memory, the engine's CUDA path on it, and the tests of both; `device.py`
begins to explain.
"""
