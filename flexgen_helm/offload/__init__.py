"""Three tiers of memory: byte ledgers, copies between them, and the weights and activations that
they hold.
"""
