"""The offers that the engines of an update make to each other: memory that they read the weights from.

They are made in the session of the update, once for all updates without a change. An offer is final: all engines see
the same ones, and plan alike.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from sglang_reshard.control import WaitTimedOut
from sglang_reshard.errors import Mismatch
from sglang_reshard.protocol.messages import Text, decode, encode
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes.nixl.remote_shards import RemoteShards

T = TypeVar("T")
# An engine rank says in 63 bits how many of its tensors are complete, in which update and by which plan.
UPDATE_BITS, CHECK_BITS, COUNT_BITS = 23, 20, 20
MAX_UPDATE = (1 << UPDATE_BITS) - 1
_MAX_ENGINES = 1 << 16
_OFFER_S = 30.0  # how long the others wait for an engine's offer


class Relay(msgspec.Struct, frozen=True):
    """Asks an engine to read from another engine the weights that the other has already read, and to let others read
    its weights.

    offers   prefix of the keys of the engines' offers in the session; another one once anything has changed
    engines  names of all engines of the update, the same for all
    own      number of this one among them
    update   number of the update among those of all engines
    """

    offers: Text
    engines: Annotated[tuple[Text, ...], Meta(min_length=2, max_length=_MAX_ENGINES)]
    own: Annotated[int, Meta(ge=0)]
    update: Annotated[int, Meta(ge=1, le=MAX_UPDATE)]

    @classmethod
    def of(cls, options: bytes) -> Relay:
        """Returns what a request asks. Raises Mismatch for an invalid request."""
        relay = decode(options, cls)
        if relay.own >= len(relay.engines):
            raise Mismatch(
                f"invalid update request: it names engine {relay.own} of {len(relay.engines)} engines. Send it with "
                "sglang_reshard.MultiEngineSender"
            )
        return relay


class OfferedRank(msgspec.Struct, frozen=True):
    """One engine rank of an offer.

    host        identity of its host
    memory      content hash of its `OfferedMemory`
    layout      content hash of the layout of its own weights
    unreadable  names of tensors that cannot be read back from its live memory; for the engine's first rank alone
    error       why it offers nothing; empty if it does
    """

    host: str = ""
    memory: str = ""
    layout: str = ""
    unreadable: tuple[str, ...] = ()
    error: str = ""


class OfferedMemory(msgspec.Struct, frozen=True):
    """The parts of the checkpoint tensors `names` that an engine rank holds; its word is one more shard, the last."""

    names: tuple[str, ...]
    remote: RemoteShards


class Offer(msgspec.Struct, frozen=True):
    """The weights that an engine passes on.

    layout  content hash of the layout of its live weights, with engine ranks in place of trainer ranks
    error   why it offers nothing; empty if it does
    final   whether it would not offer anything in another update either
    """

    layout: str = ""
    ranks: tuple[OfferedRank, ...] = ()
    error: str = ""
    final: bool = False


class RelayOffers:
    """The offers of `relay`, and the values they refer to."""

    def __init__(self, session: Session, relay: Relay, timeout_s: float, scope: str = "") -> None:
        """`scope`: of the update, whose end ends all waits."""
        self._session, self._relay, self._timeout_s, self._scope = session, relay, timeout_s, scope

    def put(self, value: object) -> str:
        """Publishes a value, as long as the offers are valid. Returns its content hash."""
        return self._session.put(value, f"{self._relay.offers}/")

    def get(self, digest: str, kind: type[T], what: str) -> T:
        """Returns the value of a content hash. Raises as `Session.get` does."""
        return self._session.get(f"{self._relay.offers}/{digest}", kind, what, self._timeout_s, scope=self._scope)

    def all(self) -> tuple[int, list[Offer]]:
        """Returns the offers of all engines, after a number of CHECK_BITS that tells them from others. Gives up engines
        that make none in time.
        """
        client, keys = self._session.client, [_key(self._relay, n) for n in range(len(self._relay.engines))]
        wait_s = min(_OFFER_S, self._timeout_s / 2)
        try:
            found = client.get(keys, wait_s, self._scope)
        except WaitTimedOut as error:
            for engine in error.missing:
                make_offer(self._session, self._relay, engine, Offer(error=f"it offered nothing within {wait_s:g} s"))
            found = client.get(keys, self._timeout_s, self._scope)
        check = int.from_bytes(hashlib.sha256(b"".join(found)).digest()[:4], "little") % (1 << CHECK_BITS)
        return check, [decode(data, Offer) for data in found]


def make_offer(session: Session, relay: Relay, engine: int, offer: Offer) -> None:
    """Makes an engine's offer, unless it has made one or others have given it up."""
    session.client.compare_set(_key(relay, engine), b"", encode(offer))


def _key(relay: Relay, engine: int) -> str:
    return f"{relay.offers}/offer/{engine}"
