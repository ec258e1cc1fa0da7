"""What a machine can do: profiles and measured rates, memory, threads, settings of the process, and
fast paths that failed here. No torch at import.
"""
