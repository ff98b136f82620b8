"""One exception root and one type per boundary.

Bad input raises ValueError (or pydantic's ValidationError, which is one). A GyreError means that a boundary of the
system failed: the message says what happened and what to change. `assert` is for our own bugs only.
"""


class GyreError(Exception):
    """Root of every error that Gyre raises at a boundary."""


class ConfigError(GyreError, ValueError):
    """A configuration cannot be run; the message names the key and what to change."""


class SetupError(GyreError):
    """The machine lacks something; the message has the command that mends it."""


class RunOwnedError(GyreError):
    """Another process runs this run; one at a time may."""


class EngineError(GyreError):
    """An inference engine did not start, answer, or accept weights.

    `retryable` is True when the same call may succeed on another engine, or on this one later (it was unreachable,
    busy or shutting down); False when the call itself or the engine's answer is at fault.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class ProxyError(GyreError):
    """The proxy refused a request or could not keep its record.

    `retryable` is True when it did not answer at all and may do so later: a proxy that died is started again.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class SandboxError(GyreError):
    """A sandbox could not be built, so no harness ran in it."""


class ProblemError(GyreError, ValueError):
    """A problem directory is not usable; the message names the file and what it lacks."""


class StoreError(GyreError):
    """The object store refused, lost or held a broken object."""


class StoreConflictError(StoreError):
    """Another writer took the same manifest number or run; read the head again and retry."""


class TrainError(GyreError):
    """A micro-step or an optimizer step was refused (non-finite values, wrong shapes)."""


class TransferError(GyreError):
    """Bytes did not arrive whole: the transfer failed or its checksum differs."""
