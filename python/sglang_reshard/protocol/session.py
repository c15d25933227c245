"""Joins one process to a session: the key-value server of trainer rank 0, where ranks publish metadata.

It holds layouts, memory handles and results; no tensor passes through it. The server listens on the loopback
interface unless another is given, and only processes that know the session's key can connect.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from sglang_reshard.control import Address, ControlClient, ControlServer, WaitTimedOut, weakly
from sglang_reshard.control.torch_store import ControlStore
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from sglang_reshard.protocol.update_channel import EngineChannel, TrainerChannel

T = TypeVar("T")
_TRAINERS = "trainers"  # the scope that trainer ranks stay in between updates
LOOPBACK = "127.0.0.1"
PUBLISHED_S = 30.0  # for what a trainer has published before it sends its request
LEAVE_TIMEOUT_S = 10.0  # how long trainer rank 0 waits at the end for ranks that may have died


def is_loopback(interface: str) -> bool:
    """Returns whether only this host reaches it."""
    return interface in ("localhost", "::1") or interface.startswith("127.")


def handles_key(trainer_rank: int, digest: str = "") -> str:
    """Returns where a trainer rank's `Handles` lie: ranks that have equal ones delete their own only."""
    return f"handles/{trainer_rank}/{digest}"


def of_engine(engine: int, name: str) -> str:
    """Returns a key that is deleted when the session ends for this engine."""
    return f"{_engine_scope(engine)}/{name}"


class Session:
    """One process's connection to a session. Safe to use from several threads.

    Values are published as msgpack, compressed: they are too large for a request. A value is stored under its content
    hash, which the reader knows and checks. Where only the publisher is known, it lies under a key that says whose it
    is, and replaces what that one has published before.

    Published values of trainer ranks stay until they change: the source layout, each rank's memory handles. So does
    what engine ranks have: what they request of trainer ranks, the regions and names that they want checksums of.
    """

    def __init__(self, client: ControlClient, server: ControlServer | None = None) -> None:
        """Ends the connection when this is dropped."""
        client.drop_with(self)
        self.client, self._server = client, server
        self._stores: dict[int, ControlStore] = {}  # by engine

    @property
    def address(self) -> Address:
        return self.client.address

    @classmethod
    def host(cls, interface: str = LOOPBACK, timeout_s: float = 300.0) -> Session:
        """Opens a session on a free port of `interface`, an address of this host.

        Raises OSError for the address of another host, and Unsupported for one that peers cannot connect to.
        """
        server = ControlServer.open(interface)
        return cls(ControlClient(server.address, timeout_s), server)

    @classmethod
    def join(cls, address: Address, timeout_s: float = 300.0, connect_s: float | None = None) -> Session:
        """Connects to a session. Raises DeadlineExceeded if nothing answers, Unauthorized for a wrong key.

        connect_s  for the connection alone; by default `timeout_s`
        """
        return cls(ControlClient(address, timeout_s, connect_s))

    # -- published values

    def put(self, value: object, key: str = "", *, hashed: bool = True) -> str:
        """Publishes a value. Returns its content hash.

        key     the value's key is this one, followed by the content hash if it is `hashed`
        """
        digest, blob = pack_blob(value)
        self.client.set({f"{key}{digest}" if hashed else key: blob})
        return digest

    def get(self, key: str, kind: type[T], what: str, timeout_s: float, *, hashed: bool = True, scope: str = "") -> T:
        """Returns the value under a key, once it is there.

        key    ends with the value's content hash if it is `hashed`
        what   its name in errors, with the rank that publishes it: "the memory handles of trainer rank 3"
        scope  whose end ends the wait

        Raises DeadlineExceeded, Aborted, and Mismatch for a value of another content hash or kind.
        """
        (data,) = self.client.get([key], timeout_s, scope, explain=lambda _: (
            f"{what} did not arrive within {timeout_s:.0f} s; look at the log of the rank that publishes it"
        ))  # fmt: skip
        return unpack_blob(data, kind, key.rpartition("/")[2] if hashed else "", what=what)

    # -- updates

    def trainer_channel(self, update: int, rank_name: str) -> TrainerChannel:
        """Returns the channel of one update, to be used in a `with` block. `rank_name` is shown in others' errors."""
        return TrainerChannel(self.client, update, _with_process(rank_name))

    def engine_channel(self, update: int, engine: int, rank_name: str) -> EngineChannel:
        """Returns that of a rank of one engine."""
        return EngineChannel(self.client, update, engine, _with_process(rank_name))

    def watch_peers(self, rank_name: str, callback: Callable[[str], None]) -> None:
        """Declares this process a trainer rank until it leaves the session.

        Calls `callback(reason)` in another thread once a trainer rank has died, also if it did so before. `callback` is
        a method, whose object is not kept.
        """
        self.client.enter(_TRAINERS, _with_process(rank_name))
        self.client.watch(_TRAINERS, weakly(callback))

    @property
    def local_address(self) -> str:
        """This host's address on the network that reaches the control server: there the peers are, too."""
        return self.client.local_address

    def store(self, engine: int, timeout_s: float, scope: str) -> dist.Store:
        """Returns a store for the rendezvous of process groups with an engine's ranks.

        `scope`, an update's, aborts its waits. Remaining keys there are deleted with the update's messages: by then all
        groups have connected. There is one store for each engine: this also bounds waits through earlier prefixes.
        """
        if engine not in self._stores:
            self._stores[engine] = ControlStore(self.client, timeout_s, scope)
        self._stores[engine].bound_waits(timeout_s, scope)
        return dist.PrefixStore(f"{scope}/groups", self._stores[engine])

    # -- engines that join and leave, while the session goes on

    def end_engine(self, engine: int) -> None:
        """Ends the session for one engine. Called by trainer rank 0."""
        self.client.cancel(_engine_scope(engine), "the session has ended for this engine")
        self.client.delete_prefix(of_engine(engine, ""))

    def on_engine_end(self, engine: int, callback: Callable[[Session | None], None]) -> None:
        """Calls `callback(session)` in another thread once the session has ended for this engine, or for all.

        `callback` is a method, whose object is not kept, nor is this session.
        """
        call, session = weakly(callback), weakref.ref(self)
        self.client.watch(_engine_scope(engine), lambda _: call(session()))

    # -- the end

    def leave(self, trainer_rank: int) -> None:
        """Tells trainer rank 0 that this trainer rank no longer needs the session, and disconnects."""
        self.client.set({f"left/{trainer_rank}": b""})
        self.client.close()

    def end(self, trainer_ranks: int) -> None:
        """Ends the session. Called by trainer rank 0, which waits up to LEAVE_TIMEOUT_S for the others to leave."""
        with contextlib.suppress(WaitTimedOut):  # they have died, or will find the session ended
            self.client.get([f"left/{rank}" for rank in range(1, trainer_ranks)], LEAVE_TIMEOUT_S)
        self.client.end_session()
        self.client.close()
        if self._server is not None:
            self._server.close()


def _with_process(rank_name: str) -> str:
    return f"{rank_name} (host {socket.gethostname()}, process {os.getpid()})"


def _engine_scope(engine: int) -> str:
    return f"engine/{engine}"
