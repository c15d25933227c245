"""A torch.distributed.Store over a control client, so that process groups can rendezvous through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from sglang_reshard.control.client import ControlClient, WaitTimedOut

T = TypeVar("T")


class ControlStore(dist.Store):
    """The keys of a client's session. Pass it to each process group inside a separate `PrefixStore`.

    A wait that times out raises DistStoreError, as torch expects of a store. Aborted and ConnectionLost pass through
    unchanged; both are RuntimeErrors too.
    """

    def __init__(self, client: ControlClient, timeout_s: float, scope: str = "") -> None:
        """See `bound_waits`. The client keeps every store for as long as it exists: do not make one per update."""
        super().__init__()
        self._client = client
        client.keep_alive(self)  # torch's stores and groups hold only the C++ part of this, which does nothing alone
        self.bound_waits(timeout_s, scope)

    def bound_waits(self, timeout_s: float, scope: str) -> None:
        """Waits that begin from now on last `timeout_s` at most, and end when `scope` is cancelled."""
        self._scope = scope
        self.set_timeout(timedelta(seconds=timeout_s))

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set({key: _as_bytes(value)})

    def get(self, key: str) -> bytes:
        return self._await(self._client.get, [key], None)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._await(self._client.wait, keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return all(self._client.exists(keys))

    def add(self, key: str, value: int) -> int:
        return self._client.add(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._client.compare_set(key, _as_bytes(expected_value), _as_bytes(desired_value))

    def delete_key(self, key: str) -> bool:
        return self._client.delete_keys([key]) > 0

    def num_keys(self) -> int:
        return self._client.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # the names that torch's C++ code calls

    def has_extended_api(self) -> bool:
        return False  # `multi_get` and others are missing; `append` means another thing there

    def _await(self, method: Callable[[Sequence[str], float, str], T], keys: list[str], timeout: timedelta | None) -> T:
        own: timedelta = self.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
        seconds = (own if timeout is None else timeout).total_seconds()
        try:
            return method(keys, seconds, self._scope)
        except WaitTimedOut as error:
            names = ", ".join(keys[index] for index in error.missing[:5])
            raise dist.DistStoreError(
                f"{names} was not set within {seconds:g} s; check the logs of the other ranks"
            ) from None


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
