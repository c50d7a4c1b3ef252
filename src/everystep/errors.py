"""Every error of everystep.

    EverystepError                     .hint says what to do
    ├── UsageError (also ValueError)   OptionsError, UnsupportedState, ModelMismatch, RunBusy,
    │                                  RunHasSteps
    ├── CaptureError                   CaptureTooLarge
    ├── LaneError                      LaneTimeout, NotEnoughMemory, ProtocolMismatch, DescriptorsRefused,
    │                                  ShadowLost
    ├── StoreError                     NotARun, CorruptData, UnknownVersion, Fenced, NotEnoughDisk
    └── RecoveryError                  NothingToRecover, StepUnavailable, DirectoryLost

A message names the operation, the object, what was found and what was expected; the remedy goes into
`hint`. Errors travel untouched to two boundaries: the trainer's session and the shadow's main loop.
"""

from __future__ import annotations

from everystep.text import printable


class EverystepError(Exception):
    """Base of all errors raised by everystep."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return printable(f"{message}\nhint: {self.hint}" if self.hint else message)


class UsageError(EverystepError, ValueError):
    """The call cannot work as it was made; nothing was changed."""


class OptionsError(UsageError):
    """An option has a value it cannot have."""


class UnsupportedState(UsageError):
    """User state holds a type that our formats do not carry."""


class ModelMismatch(UsageError):
    """The run holds another model than the one given."""


class RunBusy(UsageError):
    """Another living trainer holds this run."""


class RunHasSteps(UsageError):
    """The run may not be resumed, and there is something to resume."""


class CaptureError(EverystepError):
    """A step could not be recorded."""


class CaptureTooLarge(CaptureError):
    """An event does not fit into a slot; the ring has to be made again, larger."""

    def __init__(self, message: str, *, need_bytes: int) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes


class LaneError(EverystepError):
    """Shared memory or the control channel failed."""


class LaneTimeout(LaneError):
    """A bounded wait ended; the message names what was waited for."""


class NotEnoughMemory(LaneError):
    """This machine does not give shared memory of the size needed."""


class ProtocolMismatch(LaneError):
    """The other process runs a version of everystep whose messages this one does not understand."""


class DescriptorsRefused(LaneError):
    """The kernel does not let shared memory pass from one process to another here."""


class ShadowLost(LaneError):
    """The shadow process is gone or never came up."""


class StoreError(EverystepError):
    """The run's directory cannot be read or written as needed."""


class NotARun(StoreError):
    """The directory exists but is not a run of everystep."""


class CorruptData(StoreError):
    """Stored bytes do not match their checksum or their specification."""


class UnknownVersion(StoreError):
    """Stored by another everystep, in another format."""


class Fenced(StoreError):
    """A newer term owns the run; this one may commit nothing more."""


class NotEnoughDisk(StoreError):
    """Not even one base fits where the run is to be written."""


class RecoveryError(EverystepError):
    """The state asked for cannot be brought back."""


class NothingToRecover(RecoveryError):
    """Neither a living shadow nor the store holds a valid point."""


class StepUnavailable(RecoveryError):
    """The step asked for is not kept."""


class DirectoryLost(RecoveryError):
    """A living shadow's run directory is not where it was, and nobody has said what is to become of it."""


class SilentCorruption(EverystepError):
    """Copies of a tensor that every rank should have alike are not alike."""
