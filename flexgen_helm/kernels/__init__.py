"""Loops that no library has, compiled by numba for the host's processor; whoever calls them has a
slower way.
"""
