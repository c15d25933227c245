"""Joins one process to a session: the key-value server of trainer rank 0, in which ranks publish metadata.

It holds layouts, memory handles and results; no tensor passes through it. The server listens on the loopback
interface unless another is given, and only processes that know the session's key can connect.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from sglang_reshard.control import Address, ControlClient, ControlServer, ControlStore, WaitTimedOut
from sglang_reshard.digest.regions import RegionSet
from sglang_reshard.errors import Aborted, DeadlineExceeded
from sglang_reshard.layout.manifest import pack_blob, unpack_blob
from sglang_reshard.protocol.update_channel import EngineChannel, TrainerChannel

T = TypeVar("T")
_TRAINERS = "trainers"  # the scope that trainer ranks stay in between updates
LOOPBACK = "127.0.0.1"
LEAVE_TIMEOUT_S = 10.0  # how long trainer rank 0 waits at the end for ranks that may have died


class Session:
    """One process's connection to a session. Safe to use from several threads."""

    def __init__(self, client: ControlClient, server: ControlServer | None = None) -> None:
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
    def join(cls, address: Address, timeout_s: float = 300.0) -> Session:
        """Connects to a session. Raises DeadlineExceeded if nothing answers, Unauthorized for a wrong key."""
        return cls(ControlClient(address, timeout_s))

    def trainer_channel(self, update: int, rank_name: str) -> TrainerChannel:
        """Returns the channel of one update, to be used in a `with` block. `rank_name` is shown in others' errors."""
        return TrainerChannel(self.client, update, _with_process(rank_name))

    def engine_channel(self, update: int, engine: int, rank_name: str) -> EngineChannel:
        """Returns that of a rank of one engine."""
        return EngineChannel(self.client, update, engine, _with_process(rank_name))

    def watch_peers(self, rank_name: str, callback: Callable[[str], None]) -> None:
        """Declares this process a trainer rank until it leaves the session.

        Calls `callback(reason)` in another thread once a trainer rank has died, also if it did so before.
        """
        with contextlib.suppress(Aborted):  # reported to `callback`
            self.client.enter(_TRAINERS, _with_process(rank_name))
        self.client.watch(_TRAINERS, callback)

    @property
    def local_address(self) -> str:
        """This host's address on the network by which the control server is reached: there the peers are, too."""
        return self.client.local_address

    def store(self, engine: int, timeout_s: float, scope: str) -> dist.Store:
        """Returns a store for the rendezvous of process groups with an engine's ranks.

        `scope`, an update's, aborts its waits. What is left there is deleted with the update's messages: by then all
        groups have connected.
        """
        return dist.PrefixStore(f"{scope}/groups", self._bounded_store(engine, timeout_s, scope))

    def _bounded_store(self, engine: int, timeout_s: float, scope: str) -> ControlStore:
        """Returns the store for process groups with an engine's ranks.

        There is one. What waits in it from now on, through whichever of its prefixes, ends after `timeout_s`, or when
        `scope` is cancelled.
        """
        if engine not in self._stores:
            self._stores[engine] = ControlStore(self.client, timeout_s, scope)
        self._stores[engine].bound_waits(timeout_s, scope)
        return self._stores[engine]

    # -- published by trainer ranks, until it changes

    def put_layout(self, message: object) -> str:
        digest, blob = pack_blob(message)
        self.client.set({f"layout/{digest}": blob})
        return digest

    def put_handles(self, trainer_rank: int, message: object) -> str:
        digest, blob = pack_blob(message)
        self.client.set({f"handles/{trainer_rank}/{digest}": blob})
        return digest

    def get_layout(self, digest: str, kind: type[T], timeout_s: float) -> T:
        return self._get(f"layout/{digest}", digest, "the source layout", kind, timeout_s)

    def get_handles(self, trainer_rank: int, digest: str, kind: type[T], timeout_s: float) -> T:
        name = f"the memory handles of trainer rank {trainer_rank}"
        return self._get(f"handles/{trainer_rank}/{digest}", digest, name, kind, timeout_s)

    def delete_handles(self, trainer_rank: int, digest: str) -> None:
        self.client.delete_keys([f"handles/{trainer_rank}/{digest}"])

    # -- published by engine ranks, until it changes

    def put_regions(self, regions: RegionSet) -> str:
        """Publishes the regions that an engine rank wants checksums of. Returns their content hash."""
        digest, blob = pack_blob(regions)
        self.client.set({f"regions/{digest}": blob})
        return digest

    def get_regions(self, engine_rank: int, digest: str, timeout_s: float) -> RegionSet:
        return self._get(f"regions/{digest}", digest, f"the regions of engine rank {engine_rank}", RegionSet, timeout_s)

    def put_names(self, names: Sequence[str]) -> str:
        """Publishes the names under which an engine's loader reads a layout's tensors. Returns their content hash."""
        digest, blob = pack_blob(tuple(names))
        self.client.set({f"names/{digest}": blob})
        return digest

    def get_names(self, digest: str, timeout_s: float) -> tuple[str, ...]:
        name = "the names that the engine's loader reads"
        return self._get(f"names/{digest}", digest, name, tuple[str, ...], timeout_s)

    # -- published by one end of a route for the other

    @staticmethod
    def of_engine(engine: int, name: str) -> str:
        """Returns a key that is deleted when the session ends for this engine."""
        return f"{_engine_prefix(engine)}{name}"

    def put(self, key: str, message: object) -> None:
        """Publishes a message; replaces what was there."""
        self.client.set({key: pack_blob(message)[1]})

    def get(self, key: str, kind: type[T], name: str, timeout_s: float) -> T:
        """Returns what was put under `key`; `name` is its name in errors."""
        return self._get(key, "", name, kind, timeout_s)

    def delete(self, key: str) -> None:
        self.client.delete_keys([key])

    # -- engines that join and leave, while the session goes on

    def end_engine(self, engine: int) -> None:
        """Ends the session for one engine. Called by trainer rank 0."""
        self.client.cancel(_engine_scope(engine), "the session has ended for this engine")
        self.client.delete_prefix(_engine_prefix(engine))

    def on_engine_end(self, engine: int, callback: Callable[[], None]) -> None:
        """Calls `callback` in another thread once the session has ended for this engine, or for all."""
        self.client.watch(_engine_scope(engine), lambda _: callback())

    # -- the end

    def leave(self, trainer_rank: int) -> None:
        """Tells trainer rank 0 that this trainer rank needs the session no more, and disconnects."""
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

    def _get(self, key: str, digest: str, name: str, kind: type[T], timeout_s: float) -> T:
        try:
            (data,) = self.client.get([key], timeout_s)
        except WaitTimedOut:
            raise DeadlineExceeded(f"{name} did not arrive within {timeout_s:.0f} s") from None
        return unpack_blob(data, kind, digest, what=name)


def _with_process(rank_name: str) -> str:
    return f"{rank_name} (host {socket.gethostname()}, process {os.getpid()})"


def _engine_prefix(engine: int) -> str:
    return f"engine/{engine}/"


def _engine_scope(engine: int) -> str:
    return f"engine/{engine}"
