"""One GPU: its rates, and large models in little of its memory, beside predictions, Accelerate and others.

`make gpu-check` runs its steps from the sources, and needs only a few libraries. Each step is a process with a limit of
seconds of its own. Each result is written when it is known. Models have random weights.
"""
