"""Decisions of a run: which sequences exist, what they share, who is in the next pass, in which
order. No torch.
"""
