"""One GPU: its rates, and large models in little of its memory, beside predictions and
transformers.

`make gpu-check` runs the steps of `session` from the sources, and needs only a few libraries. Each
is a process of `steps` with a limit of seconds of its own. Models have random weights.
"""
