"""What the machine can do: measured rates and capacities. No torch at import."""
