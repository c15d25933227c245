"""Limits on the memory that a control server uses for its clients."""

from __future__ import annotations

from collections.abc import Callable

DEFAULT_STORED_BYTES = 4 * 2**30
MAX_NAMES = 1_000_000  # keys, scopes and all-gathers of all sessions
MAX_NAME_CHARACTERS = 1024
MAX_REASON_CHARACTERS = 64 * 1024
MAX_WAITS = 4096  # of one connection at a time
_NAME_BYTES = 256  # about what Python takes for an entry of a dictionary, without the characters of its key


class QuotaExceeded(Exception):
    """A request exceeds a limit, or contradicts another one. The message is for the client that sent it."""


class MemoryQuota:
    """Counts the bytes and names that all sessions of a control server hold together, including unfinished frames and
    unsent replies.
    """

    def __init__(
        self,
        stored_bytes: int = DEFAULT_STORED_BYTES,
        names: int = MAX_NAMES,
        recount: Callable[[], None] = lambda: None,
    ) -> None:
        """`recount` gives back what is no longer held. It is called before anything is refused."""
        self._max_bytes, self._max_names, self._recount = stored_bytes, names, recount
        self.stored_bytes = self.names = 0

    def take(self, size: int, names: int = 0) -> None:
        """Accounts for `size` more bytes and `names` more names; negative numbers give back.

        Raises QuotaExceeded without taking anything.
        """
        size += names * _NAME_BYTES
        if size > 0 and self.stored_bytes + size > self._max_bytes:
            self._recount()
        if size > 0 and self.stored_bytes + size > self._max_bytes:
            raise QuotaExceeded(
                f"the control server's store is full: its limit is {self._max_bytes} bytes for the layouts and memory "
                "handles of all sessions. Close senders that are no longer used"
            )
        if names > 0 and self.names + names > self._max_names:
            raise QuotaExceeded(
                f"the control server's store is full: its limit is {self._max_names} names for all sessions. Close "
                "senders that are no longer used"
            )
        self.stored_bytes += size
        self.names += names


def check_name(*names: str) -> None:
    """Raises QuotaExceeded for a name that is too long."""
    for name in names:
        if len(name) > MAX_NAME_CHARACTERS:
            raise QuotaExceeded(
                f"the name {name[:80]}... has {len(name)} characters; the limit is {MAX_NAME_CHARACTERS}"
            )
