"""Words between trainer rank 0 and the rollout workers of a replica, over the hub of the sessions.

They are few: where the replica's server is, and how each sync ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sglang_reshard.control import Address, ControlClient, WaitTimedOut
from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.protocol.messages import WAITS, Failure, decode, encode


class _Outcome(msgspec.Struct, frozen=True):
    failure: Failure | None


class Meeting:
    """A process's connection to the hub that trainer rank 0 hosts."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._line = ControlClient(address.named("meeting"), timeout_s)

    def say_url(self, replica: str, url: str) -> None:
        self._line.set({f"url/{replica}": url.encode()})

    def url_of(self, replica: str) -> str:
        """Raises DeadlineExceeded when the replica's workers do not say it."""
        return self._get(f"url/{replica}", "its server's address", replica, self._timeout_s).decode()

    def say_outcome(self, sync: int, replicas: Sequence[str], failure: Failure | None) -> None:
        """Trainer rank 0: how a sync ended. What was said of the one before is forgotten."""
        for replica in replicas:
            self._line.set({f"outcome/{replica}/{sync}": encode(_Outcome(failure))})
            self._line.delete_keys([f"outcome/{replica}/{sync - 1}"])

    def await_outcome(self, sync: int, replica: str) -> None:
        """Return when a sync has ended well. Raises what it ended with, DeadlineExceeded if it does not end."""
        what = f"the end of sync {sync}"
        data = self._get(f"outcome/{replica}/{sync}", what, replica, WAITS * self._timeout_s)
        failure = decode(data, _Outcome).failure
        if failure is not None:
            raise failure.error()

    def _get(self, key: str, what: str, replica: str, timeout_s: float) -> bytes:
        try:
            return self._line.get([key], timeout_s)[0]
        except WaitTimedOut:
            raise DeadlineExceeded(
                f"replica {replica}: {what} did not arrive within {timeout_s:.0f} s; look at the logs of its workers "
                "and of trainer rank 0"
            ) from None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One sync, as a rollout worker waits for it. `leads`: it is its replica's first."""

    meeting: Meeting
    sync: int
    replica: str
    leads: bool
