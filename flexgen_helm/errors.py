"""Every error a user can meet, one sentence each: the cause, the number, the next command.

`exit_code` is what the command line returns: 1 failed, 2 wrong usage or refused, 130 interrupted.
"""

from __future__ import annotations


class FlexgenError(Exception):
    """Base of all errors that this project raises on purpose."""

    exit_code = 1


class UsageError(FlexgenError):
    """The command, argument or configuration cannot be used as given."""

    exit_code = 2


class UnknownModelError(UsageError):
    """The model name is neither in the catalogue, nor a folder, nor a hub name."""


class UnsupportedArchitectureError(UsageError):
    """The checkpoint's architecture has no family record; the message lists those that do."""


class CheckpointError(UsageError):
    """A checkpoint file is missing, truncated or corrupt; the message names file and tensor."""


class UnsafePickleError(CheckpointError):
    """A pickled checkpoint asks for more than tensors; nothing of it was executed."""

    exit_code = 1


class RequestError(FlexgenError):
    """This one request cannot be served; its batch-mates are unharmed."""


class NumericalError(RequestError):
    """A value that is not finite appeared; the message names the layer."""


class MemoryLimitError(FlexgenError):
    """A tier's byte limit would be exceeded; nothing was lost."""

    exit_code = 2


class OffloadError(FlexgenError):
    """The offload directory or one of its files cannot be used; the message names it."""


class DiskFullError(OffloadError):
    """A file does not fit on its disk; the message names both sizes."""


class Interrupted(FlexgenError):
    """The run was asked to stop; everything reported so far is kept."""

    exit_code = 130
