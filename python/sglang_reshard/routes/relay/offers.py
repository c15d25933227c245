"""The offers that the engines of an update make to each other: memory that they read the weights from.

They are made in a session of the trainer's control server, once for all updates without a change. An offer is final:
all engines see the same ones, and plan alike.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_reshard.control import Address, ControlClient, WaitTimedOut
from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.protocol.messages import Text, decode, encode
from sglang_reshard.protocol.session import Blobs
from sglang_reshard.routes.nixl.remote_shards import RemoteShards
from sglang_reshard.routes.relay.owners import MAX_UPDATE

_MAX_ENGINES = 1 << 16
_OFFER_S = 30.0  # how long the others wait for an engine's offer


class Relay(msgspec.Struct, frozen=True):
    """Asks an engine to read from another engine the weights that the other has already read, and to let others read
    its weights.

    session  name of the session for the engines' offers, within that of the update; another one once
             anything has changed
    engines  names of all engines of the update, the same for all
    own      number of this one among them
    update   number of the update among those of all engines
    """

    session: Text
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


class RelayOffers(Blobs):
    """A connection to the offers of `relay`, and to the values they refer to. `address` is of the update's session."""

    def __init__(self, address: Address, relay: Relay, timeout_s: float) -> None:
        super().__init__(ControlClient(address.named(relay.session), timeout_s), timeout_s)
        self._relay, self._scope = relay, ""

    def enter(self, who: str) -> None:
        """From here on `abort` ends the wait for other engines' offers. `who` names this process, in this engine."""
        scope = f"{self._relay.update}/{self._relay.own}/{who}"
        self.client.enter(scope, who)
        self._scope = scope

    def abort(self) -> None:
        """Lets `all` raise Aborted. Called from another thread."""
        with contextlib.suppress(ReshardError):  # the wait has ended
            self.client.cancel(self._scope, "the update was aborted")

    def make(self, engine: int, offer: Offer) -> None:
        """Makes an engine's offer, unless it has made one or others have given it up."""
        self.client.compare_set(_key(engine), b"", encode(offer))

    def all(self) -> tuple[bytes, list[Offer]]:
        """Returns what identifies the offers of all engines, and these. Gives up engines that make none in time."""
        keys = [_key(engine) for engine in range(len(self._relay.engines))]
        wait_s = min(_OFFER_S, self._timeout_s / 2)
        try:
            found = self.client.get(keys, wait_s, self._scope)
        except WaitTimedOut as error:
            for engine in error.missing:
                self.make(engine, Offer(error=f"it offered nothing within {wait_s:g} s"))
            found = self.client.get(keys, self._timeout_s, self._scope)
        return b"".join(found), [decode(data, Offer) for data in found]

    def __enter__(self) -> RelayOffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def _key(engine: int) -> str:
    return f"offer/{engine}"
