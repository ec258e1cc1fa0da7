"""The KV cache: blocks of sequences, stored on any tier, plain or quantized; and what each query
sees of it.
"""
