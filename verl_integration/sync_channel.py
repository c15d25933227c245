"""Exchanges the few messages of a sync between trainer rank 0 and rollout workers, over the sessions' control server.

They are the URL of each replica's server, and the outcome of each sync.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sglang_reshard.control import Address, ControlClient, WaitTimedOut
from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.protocol.messages import WAITS, Failure, decode, encode


class _Outcome(msgspec.Struct, frozen=True):
    """`global_steps`: the step whose weights the replica has now; None if it has no sync's yet."""

    failure: Failure | None
    global_steps: int | None = None


class SyncChannel:
    """A process's connection to the control server of trainer rank 0."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._client = ControlClient(address.named("sync"), timeout_s)
        self._client.drop_with(self)

    def put_server_url(self, replica: str, url: str) -> None:
        self._client.set({f"url/{replica}": url.encode()})

    def get_server_url(self, replica: str) -> str:
        """Returns the URL of a replica's server. Raises DeadlineExceeded if its workers do not publish it."""
        return self._get(f"url/{replica}", "its server's address", replica, self._timeout_s).decode()

    def put_outcome(
        self, sync: int, replicas: Sequence[str], failure: Failure | None, global_steps: int | None
    ) -> None:
        """Publishes the outcome of a sync for each replica, and deletes that of the previous sync."""
        for replica in replicas:
            self._client.set({f"outcome/{replica}/{sync}": encode(_Outcome(failure, global_steps))})
            self._client.delete_keys([f"outcome/{replica}/{sync - 1}"])

    def wait_for_outcome(self, sync: int, replica: str) -> int | None:
        """Returns when a sync has succeeded: the step whose weights the replica has then, if any.

        Raises the sync's failure, or DeadlineExceeded if it does not end.
        """
        what = f"the end of sync {sync}"
        data = self._get(f"outcome/{replica}/{sync}", what, replica, WAITS * self._timeout_s)
        outcome = decode(data, _Outcome)
        if outcome.failure is not None:
            raise outcome.failure.error()
        return outcome.global_steps

    def _get(self, key: str, what: str, replica: str, timeout_s: float) -> bytes:
        try:
            return self._client.get([key], timeout_s)[0]
        except WaitTimedOut:
            raise DeadlineExceeded(
                f"replica {replica}: {what} did not arrive within {timeout_s:.0f} s. Look at the logs of its workers "
                "and of trainer rank 0"
            ) from None


@dataclass(frozen=True, slots=True)
class PendingSync:
    """One sync that a rollout worker waits for. `is_first`: it is its replica's first worker."""

    channel: SyncChannel
    sync: int
    replica: str
    is_first: bool
