"""Errors a user can act on.

Every message says what happened, where, what was got, what is allowed and the next step, in one or
two sentences. A command prints the message alone and exits with `exit_code`; bugs of ours raise
`AssertionError` or whatever Python raises, never an `InkError`.
"""

from typing import ClassVar


class InkError(Exception):
    """Base of all errors of InkRT. Its text is one printable line, whatever names files gave it."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        return "".join(x if x.isprintable() else repr(x)[1:-1] for x in super().__str__())


class UsageError(InkError):
    """Options of a command that do not go together."""

    exit_code: ClassVar[int] = 2


class ConfigError(InkError):
    """A model or build configuration is invalid or not supported."""


class CheckpointError(InkError):
    """A checkpoint is missing, damaged or not what its configuration says."""


class BuildError(InkError):
    """An engine cannot be built from a valid checkpoint."""


class EngineFormatError(InkError):
    """An engine folder is damaged or not an engine."""


class EngineMismatchError(InkError):
    """A sound engine that this machine or this version cannot run."""

    exit_code: ClassVar[int] = 3


class CapacityError(InkError):
    """Memory, pages, slots or context are exhausted."""


class QueueFullError(CapacityError):
    """As many requests wait for the engine as may; ask again later."""


class CancelledRequestError(InkError):
    """A request was cancelled while somebody waited for it."""


class ClosedError(InkError):
    """The engine takes no requests any more: it is closing, or it has failed."""


class RequestError(InkError):
    """A request is invalid.

    Messages call parameters by the names of their fields: the offending one at the beginning, and
    any that the reader may change as name=value. A command puts its options there.

    Attributes:
        param: name of the offending request field.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """A prompt leaves no room in the engine's context."""


class DeviceError(InkError):
    """A device is missing, unsuitable or failed."""
