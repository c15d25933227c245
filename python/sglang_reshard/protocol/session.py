"""One process's part in a session: the control server of trainer rank 0, and what ranks publish there for each other.

It carries metadata only (layouts, handles, results); no tensor passes through it. It listens on the
loopback interface unless told otherwise, and to those only who know the session's key.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import torch

from sglang_reshard.control import Address, ControlClient, ControlServer, ControlStore, WaitTimedOut
from sglang_reshard.digest.regions import RegionSet
from sglang_reshard.errors import Aborted, DeadlineExceeded
from sglang_reshard.layout.manifest import pack_blob, unpack_blob
from sglang_reshard.plan.p2p import SendRequest
from sglang_reshard.protocol.messages import PrepareSend
from sglang_reshard.protocol.update_channel import UpdateChannel
from sglang_reshard.transports.communicator import P2pCommunicator

T = TypeVar("T")
_TRAINERS = "trainers"  # the scope that they are in as long as they live
LOOPBACK = "127.0.0.1"
LEAVING_S = 10.0  # how long trainer rank 0 waits at the end for ranks that may have died


class Session:
    """One process's part in a session. Safe to use from several threads."""

    def __init__(self, line: ControlClient, hub: ControlServer | None = None) -> None:
        self.line, self._hub = line, hub

    @property
    def address(self) -> Address:
        return self.line.address

    @classmethod
    def host(cls, interface: str = LOOPBACK, timeout_s: float = 300.0) -> Session:
        """Open a session that listens on `interface` only (an address of this host), on a free port."""
        hub = ControlServer.open(interface)
        return cls(ControlClient(hub.address, timeout_s), hub)

    @classmethod
    def join(cls, address: Address, timeout_s: float = 300.0) -> Session:
        """Connect to a session. Raises DeadlineExceeded when nothing answers, Unauthorized for a wrong key."""
        return cls(ControlClient(address, timeout_s))

    def update(self, number: int, who: str) -> UpdateChannel:
        """What is said in one update; to be used in a `with` block. `who` is this rank, as errors of others name it."""
        return UpdateChannel(self.line, number, _named(who))

    def attend(self, who: str, then: Callable[[str], None]) -> None:
        """Be one of the trainer ranks, between updates too, until this process leaves the session.

        Calls `then(reason)` in another thread once one of them has gone without leaving, or did before.
        """
        with contextlib.suppress(Aborted):  # which `then` hears
            self.line.enter(_TRAINERS, _named(who))
        self.line.watch(_TRAINERS, then)

    def store(self, timeout_s: float, scope: str) -> ControlStore:
        """For process groups to find each other by."""
        return ControlStore(self.line, timeout_s, scope)

    def connect_peers(
        self, prepare: PrepareSend, member: int, device: torch.device, scope: str
    ) -> P2pCommunicator | None:
        """Connects a rank to those that it sends to or receives from; None where it does neither.

        Collective over `prepare.members()`.

        member  trainer rank, or the number of trainer ranks plus the engine rank
        scope   whose cancellation ends the waits
        """
        members = prepare.members()
        if member not in members:
            return None
        return P2pCommunicator(
            self.store(prepare.timeout_s, scope),
            prepare.route,
            global_rank=member,
            members=members,
            trainer_ranks=len(prepare.shares),
            backend=prepare.backend,
            device=device,
            timeout_s=prepare.timeout_s,
        )

    # -- what trainer ranks publish once, until it changes

    def put_layout(self, message: object) -> str:
        digest, blob = pack_blob(message)
        self.line.set({f"layout/{digest}": blob})
        return digest

    def put_handles(self, trainer_rank: int, message: object) -> str:
        digest, blob = pack_blob(message)
        self.line.set({f"handles/{trainer_rank}/{digest}": blob})
        return digest

    def get_layout(self, digest: str, kind: type[T], timeout_s: float) -> T:
        return self._blob(f"layout/{digest}", digest, "the source layout", kind, timeout_s)

    def get_handles(self, trainer_rank: int, digest: str, kind: type[T], timeout_s: float) -> T:
        what = f"the memory handles of trainer rank {trainer_rank}"
        return self._blob(f"handles/{trainer_rank}/{digest}", digest, what, kind, timeout_s)

    def forget_handles(self, trainer_rank: int, digest: str) -> None:
        self.line.delete([f"handles/{trainer_rank}/{digest}"])

    # -- what engine ranks ask of trainer ranks, until it changes

    def put_order(self, intake: str, engine_rank: int, trainer_rank: int, order: SendRequest) -> None:
        """What an engine rank takes from a trainer rank; `intake` is the digest of all it takes."""
        self.line.set({_order_key(intake, engine_rank, trainer_rank): pack_blob(order)[1]})

    def get_order(self, intake: str, engine_rank: int, trainer_rank: int, timeout_s: float) -> SendRequest:
        what = f"the order of engine rank {engine_rank} for trainer rank {trainer_rank}"
        return self._blob(_order_key(intake, engine_rank, trainer_rank), "", what, SendRequest, timeout_s)

    def forget_order(self, intake: str, engine_rank: int, trainer_rank: int) -> None:
        self.line.delete([_order_key(intake, engine_rank, trainer_rank)])

    def put_claims(self, claims: RegionSet) -> str:
        """What an engine rank wants vouched for; the key under which trainer ranks find it."""
        digest, blob = pack_blob(claims)
        self.line.set({f"claims/{digest}": blob})
        return digest

    def get_claims(self, engine_rank: int, digest: str, timeout_s: float) -> RegionSet:
        return self._blob(f"claims/{digest}", digest, f"the claims of engine rank {engine_rank}", RegionSet, timeout_s)

    # -- the end

    def when_lost(self, then: Callable[[], None]) -> None:
        """Call `then`, in a thread of its own, once the session has ended or trainer rank 0's process has."""
        self.line.when_lost(then)

    def leave(self, trainer_rank: int) -> None:
        """Say that this trainer rank has read all that it will read, and go."""
        self.line.set({f"left/{trainer_rank}": b""})
        self.line.close()

    def end(self, trainer_ranks: int) -> None:
        """Trainer rank 0, whose process keeps the hub: stay until the others have left, or for LEAVING_S; then end."""
        with contextlib.suppress(WaitTimedOut):  # they have died, or will find the session ended
            self.line.get([f"left/{rank}" for rank in range(1, trainer_ranks)], LEAVING_S)
        self.line.end_session()
        self.line.close()
        if self._hub is not None:
            self._hub.close()

    def _blob(self, key: str, digest: str, what: str, kind: type[T], timeout_s: float) -> T:
        try:
            (data,) = self.line.get([key], timeout_s)
        except WaitTimedOut:
            raise DeadlineExceeded(f"{what} did not arrive within {timeout_s:.0f} s") from None
        return unpack_blob(data, kind, digest, what=what)


def _named(who: str) -> str:
    return f"{who} (host {socket.gethostname()}, process {os.getpid()})"


def _order_key(intake: str, engine_rank: int, trainer_rank: int) -> str:
    return f"order/{engine_rank}/{intake}/{trainer_rank}"
