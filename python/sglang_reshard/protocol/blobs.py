"""Publishes what is too large for a request on a control server, and fetches it from there: msgpack, compressed.

A value is stored under its content hash, which the reader knows and checks. Where only the publisher is known, it lies
under a key that says whose it is, and replaces what that one has published before.
"""

from __future__ import annotations

from typing import TypeVar

from sglang_reshard.control import ControlClient
from sglang_reshard.layout.decoders import pack_blob, unpack_blob

T = TypeVar("T")


class Blobs:
    """The values that are published in a session of a control server."""

    def __init__(self, client: ControlClient, timeout_s: float) -> None:
        """`timeout_s`: how long `get` waits, if nothing else is said."""
        self.client, self._timeout_s = client, timeout_s

    def put(self, value: object, key: str = "", *, hashed: bool = True) -> str:
        """Publishes a value. Returns its content hash.

        key     the value's key is this one, followed by the content hash if it is `hashed`
        """
        digest, blob = pack_blob(value)
        self.client.set({f"{key}{digest}" if hashed else key: blob})
        return digest

    def get(
        self,
        key: str,
        kind: type[T],
        what: str,
        timeout_s: float | None = None,
        *,
        hashed: bool = True,
        scope: str = "",
    ) -> T:
        """Returns the value under a key, once it is there.

        key    ends with the value's content hash if it is `hashed`
        what   its name in errors, with the rank that publishes it: "the memory handles of trainer rank 3"
        scope  whose end ends the wait

        Raises DeadlineExceeded, Aborted, and Mismatch for a value of another content hash or kind.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        (data,) = self.client.get([key], timeout_s, scope, explain=lambda _: (
            f"{what} did not arrive within {timeout_s:.0f} s; look at the log of the rank that publishes it"
        ))  # fmt: skip
        return unpack_blob(data, kind, key.rpartition("/")[2] if hashed else "", what=what)

    def delete(self, key: str) -> None:
        self.client.delete_keys([key])
