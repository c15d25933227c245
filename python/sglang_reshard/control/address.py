"""How to reach a session."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sglang_reshard.errors import Unauthorized


class Address(msgspec.Struct, frozen=True):
    """Where a hub listens, and which of its sessions is meant. Whoever has it can take part, so keep it private.

    key  32 random bytes, as hex; shown in no representation
    """

    session: str
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    key: str

    def named(self, name: str) -> Address:
        """Another session of the same hub, apart from this one: its keys, its gathers and its scopes are its own."""
        return msgspec.structs.replace(self, session=f"{self.session}/{name}")

    def secret(self) -> bytes:
        """The key itself. Raises Unauthorized if there is none."""
        try:
            return bytes.fromhex(self.key)
        except ValueError:
            raise Unauthorized(f"{self}: its key is not hexadecimal; was the address changed on its way?") from None

    def __repr__(self) -> str:
        return f"Address(session={self.session!r}, host={self.host!r}, port={self.port!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("session", self.session), ("host", self.host), ("port", self.port)]
