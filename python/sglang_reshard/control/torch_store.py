"""A line as a store of torch.distributed, so that process groups can be made over it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from sglang_reshard.control.client import ControlClient, WaitTimedOut


class ControlStore(dist.Store):
    """The keys of a line's session. Give it to process groups inside a `PrefixStore` of their own.

    A wait that ends with nothing raises DistStoreError, which is what torch expects of a store; Aborted and
    ConnectionLost come through as they are, and are RuntimeErrors too.
    """

    def __init__(self, line: ControlClient, timeout_s: float, scope: str = "") -> None:
        """`timeout_s` bounds each wait; all are given up when `scope` is aborted."""
        super().__init__()
        self._line, self._scope = line, scope
        line.keep(self)  # torch's own stores and groups hold only torch's part of this, which can do nothing alone
        self.set_timeout(timedelta(seconds=timeout_s))

    @property
    def _timeout(self) -> timedelta:
        return self.timeout  # type: ignore[attr-defined]  # torch's stub lacks it

    def set(self, key: str, value: str | bytes) -> None:
        self._line.set({key: _as_bytes(value)})

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        try:
            return self._line.get(keys, self._timeout.total_seconds(), self._scope)
        except WaitTimedOut as late:
            raise _not_there(keys, late, self._timeout) from None

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        self._line.set({key: _as_bytes(value) for key, value in zip(keys, values, strict=True)})

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout = self._timeout if timeout is None else timeout
        try:
            self._line.wait(keys, timeout.total_seconds(), self._scope)
        except WaitTimedOut as late:
            raise _not_there(keys, late, timeout) from None

    def check(self, keys: list[str]) -> bool:
        return all(self._line.present(keys))

    def add(self, key: str, value: int) -> int:
        return self._line.add(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._line.swap(key, _as_bytes(expected_value), _as_bytes(desired_value))

    def delete_key(self, key: str) -> bool:
        return self._line.delete([key]) > 0

    def num_keys(self) -> int:
        return self._line.count_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # as torch's own code calls these two

    def has_extended_api(self) -> bool:
        return False  # without `append`, which means another thing there


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _not_there(keys: Sequence[str], late: WaitTimedOut, timeout: timedelta) -> Exception:
    names = ", ".join(keys[index] for index in late.missing[:5])
    return dist.DistStoreError(
        f"{names} did not come within {timeout.total_seconds():g} s; look at the other ranks' logs"
    )
