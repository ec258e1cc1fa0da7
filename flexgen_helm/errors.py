"""The errors that users see. A message is one sentence: the cause, the number, the command that
helps.

A class's docstring is its entry in the catalogue docs/reference/errors.md, which `make pages`
writes: the cause, then `Next:` and what usually helps.

`exit_code` is what `flexgen-helm` returns: 1 failed, 2 wrong usage or refused, 130 interrupted.
"""

from __future__ import annotations


class FlexgenError(Exception):
    """Base of all errors that flexgen_helm raises on purpose; the message says what failed.

    Next: Do as the message says; `FLEXGEN_HELM_DEBUG=1` before the command also shows where it
        failed.
    """

    exit_code = 1


class UsageError(FlexgenError):
    """The command, argument or configuration cannot be used as given.

    Next: `flexgen-helm COMMAND --help` lists what can be given.
    """

    exit_code = 2


class UnknownModelError(UsageError):
    """The model name is neither in the catalog, nor a folder, nor a hub name.

    Next: `flexgen-helm models` lists the catalog.
    """


class UnsupportedArchitectureError(UsageError):
    """The checkpoint's architecture is not supported; the message lists those that are.

    Next: Take a model of a supported architecture: `flexgen-helm models` lists the catalog,
        docs/models.md all.
    """


class UnprovedModelError(UsageError):
    """A small model of the same kind does not compute here what `transformers` computes, so scores
    would be wrong.

    Next: Install the releases that the message names. `--unverified` computes all the same, and
        every record says so.
    """


class CheckpointError(UsageError):
    """A checkpoint file is missing, truncated or corrupt; the message names file and tensor.

    Next: `flexgen-helm fetch MODEL --verify` finds all damaged files of a hub model; fetch those
        again.
    """


class Float16Error(CheckpointError):
    """A bfloat16 checkpoint has values that float16 has not; the message names file and tensor.

    Next: None is needed: the engine computes such a checkpoint in float32 instead, and says so.
    """


class UnsafePickleError(CheckpointError):
    """A pickled checkpoint contains more than tensors; nothing of it was executed.

    Next: Take a safetensors version of the model.
    """

    exit_code = 1


class RequestError(FlexgenError):
    """This request cannot be served; the other requests of its batch are.

    Next: Change the request as the message says; HELM does not retry it.
    """


class ContextLengthError(RequestError):
    """A prompt and its answer are longer than the model's window.

    Next: Shorten the prompt or lower `max_tokens`.
    """

    code = "context_length_exceeded"  # of OpenAI, by which clients know it


class NumericalError(RequestError):
    """A value that is not finite appeared; the message names the layer.

    Next: `flexgen-helm doctor MODEL` checks the weights; `--precision fp16` computes without 4
        bits.
    """


class LoopError(FlexgenError):
    """A loop that was compiled for this processor ended with an error; no number of it is used.

    Next: `FLEXGEN_HELM_LOOPS=0` before the command computes with PyTorch; report the line on
        stderr.
    """


class MemoryLimitError(FlexgenError):
    """A tier's byte limit would be exceeded.

    Next: Raise the limit that the message names, or let `flexgen-helm plan` find a smaller block.
    """

    exit_code = 2


class OffloadError(FlexgenError):
    """The offload directory or one of its files cannot be used; the message names it.

    Next: Choose another folder with `--offload-dir`.
    """


class DiskFullError(OffloadError):
    """A file does not fit on its disk; the message names both sizes.

    Next: `flexgen-helm clean` lists what can go.
    """


class PipelineError(FlexgenError):
    """A rank of the pipeline ended, so the others cannot go on; the message names it.

    Next: Start the same command again: finished answers are kept.
    """


class WorkerError(FlexgenError):
    """Workers of a cluster failed, and what was tried again on others failed too; the message says
    why.

    Next: Start the same command again: finished answers are kept.
    """


class Interrupted(FlexgenError):
    """The run was interrupted; results that were reported before are kept.

    Next: Start the same command again.
    """

    exit_code = 130
