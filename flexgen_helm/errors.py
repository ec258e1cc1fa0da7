"""The errors that users see. A message is one sentence: the cause, the number, the command that helps.

`exit_code` is what `flexgen-helm` returns: 1 failed, 2 wrong usage or refused, 130 interrupted.
"""

from __future__ import annotations


class FlexgenError(Exception):
    """Base of all errors that flexgen_helm raises on purpose."""

    exit_code = 1


class UsageError(FlexgenError):
    """The command, argument or configuration cannot be used as given."""

    exit_code = 2


class UnknownModelError(UsageError):
    """The model name is neither in the catalog, nor a folder, nor a hub name."""


class UnsupportedArchitectureError(UsageError):
    """The checkpoint's architecture is not supported; the message lists those that are."""


class CheckpointError(UsageError):
    """A checkpoint file is missing, truncated or corrupt; the message names file and tensor."""


class Float16Error(CheckpointError):
    """A bfloat16 checkpoint has values that float16 has not; the message names file and tensor."""


class UnsafePickleError(CheckpointError):
    """A pickled checkpoint contains more than tensors; nothing of it was executed."""

    exit_code = 1


class RequestError(FlexgenError):
    """This request cannot be served; the other requests of its batch are."""


class NumericalError(RequestError):
    """A value that is not finite appeared; the message names the layer."""


class MemoryLimitError(FlexgenError):
    """A tier's byte limit would be exceeded."""

    exit_code = 2


class OffloadError(FlexgenError):
    """The offload directory or one of its files cannot be used; the message names it."""


class DiskFullError(OffloadError):
    """A file does not fit on its disk; the message names both sizes."""


class PipelineError(FlexgenError):
    """A rank of the pipeline ended, so the others cannot go on; the message names it."""


class WorkerError(FlexgenError):
    """Workers of a cluster failed, and what was tried again on others failed too; the message says why."""


class Interrupted(FlexgenError):
    """The run was interrupted; results that were reported before are kept."""

    exit_code = 130
