"""How requests of other harnesses become ours, and results theirs."""
