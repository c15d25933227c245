"""Errors that users see. Each says what is wrong, which tensor, which rank, and what to do next."""


class ReshardError(RuntimeError):
    """Base of every error this package raises on purpose."""


class Unsupported(ReshardError):
    """This configuration cannot be carried; nothing was written and the old weights keep serving."""


class Mismatch(ReshardError):
    """The two sides, or two ranks of one side, disagree; nothing was written."""


class DeadlineExceeded(ReshardError):
    """A wait ended without what it waited for. Names the phase, the rank and what was awaited."""


class TornWeights(ReshardError):
    """An update broke off while weights were being written; the engine needs a successful update."""


class EngineRefused(ReshardError):
    """The engine answered an update with a failure; the message is the engine's own."""


class Aborted(ReshardError):
    """Another rank failed or has gone, and the update was given up on all ranks."""


class ConnectionLost(ReshardError):
    """Trainer rank 0's process, which all ranks meet in, cannot be reached any more."""


class Unauthorized(ReshardError):
    """The other side does not know this session's key."""


class EngineDied(ReshardError):
    """A process of the engine has ended. End the engine and start another one."""
