"""The address of a session: where its control server listens, and the key that proves membership."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sglang_reshard.errors import Unauthorized


class Address(msgspec.Struct, frozen=True):
    """Host and port of a control server, and one of its sessions. Any process that has it can join, so keep it private.

    session  name of the session
    host     IP address or name that the control server listens on
    port     its TCP port
    key      32 random bytes, as hex; omitted from every representation
    """

    session: Annotated[str, msgspec.Meta(max_length=512)]  # names of keys and scopes are added to it
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255, pattern=r"^[^\0]+\Z")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]

    def named(self, name: str) -> Address:
        """Returns the address of another session of the same server, with separate keys, all-gathers and scopes."""
        return msgspec.structs.replace(self, session=f"{self.session}/{name}")

    def secret(self) -> bytes:
        """Returns the key's bytes. Raises Unauthorized if the key is not hexadecimal."""
        try:
            return bytes.fromhex(self.key)
        except ValueError:
            raise Unauthorized(f"{self}: the key is not hexadecimal; pass the session address unchanged") from None

    def __repr__(self) -> str:
        return f"Address(session={self.session!r}, host={self.host!r}, port={self.port!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("session", self.session), ("host", self.host), ("port", self.port)]
