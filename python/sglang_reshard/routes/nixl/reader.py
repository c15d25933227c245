"""An engine rank's NIXL agent: reads the registered memory of other ranks, which are named as errors name them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reshard.errors import PeerDisconnected
from sglang_reshard.routes.nixl.agent import NixlAgent
from sglang_reshard.routes.nixl.remote_shards import RemoteShard, RemoteShards
from sglang_reshard.routes.nixl.source import storage_range


class NixlReader:
    """Reads from peers, "trainer rank 0" or "engine rank 1 of replica 0"."""

    def __init__(self, engine_rank: int) -> None:
        """Raises Unsupported without NIXL."""
        self._owner = f"engine rank {engine_rank}"
        self._agent = NixlAgent(self._owner)
        self._aborted = threading.Event()
        self._peers: dict[str, str] = {}
        self._remote: dict[str, RemoteShards] = {}
        self._reads: list[Any] = []

    def connect(self, remote: Mapping[str, RemoteShards]) -> None:
        """Learns the memory of peers; opens no connection yet."""
        for peer, shards in remote.items():
            self._peers[peer] = self._agent.add_peer(shards.metadata, peer)
        self._remote.update(remote)

    def shard(self, peer: str, tensor: int) -> RemoteShard:
        """Returns where a peer has its shard of its layout's tensor number `tensor`."""
        return self._remote[peer].shards[tensor]

    def register(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Makes local memory one that can be read into."""
        unique = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
        self._agent.register([storage_range(storage) for storage in unique.values()])

    def prepare(self, peer: str, remote: tuple[str, np.ndarray], local: tuple[str, np.ndarray]) -> Any:
        read = self._agent.prepare_read(self._peers[peer], remote, local, peer)
        self._reads.append(read)
        return read

    def release(self, reads: Sequence[Any]) -> None:
        """Frees reads that have ended, and will not be started again."""
        for read in reads:
            self._reads.remove(read)
            self._agent.release(read)

    def start(self, peer: str, reads: Sequence[Any]) -> None:
        for read in reads:
            self._agent.start(read, peer)

    def are_done(self, peer: str, reads: Sequence[Any]) -> bool:
        """Returns whether reads have ended. Raises PeerDisconnected if one failed, or after `abort`."""
        if self._aborted.is_set():
            raise PeerDisconnected(f"{self._owner} stopped reading from {peer}: the update was aborted")
        return all(self._agent.is_done(read, peer) for read in reads)

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def abort(self) -> None:
        """Fails this rank's reads from now on. May be called from any thread."""
        self._aborted.set()

    def restart(self, peers: Sequence[str]) -> None:
        """Ends all reads, so that none writes to this rank's memory afterwards, and connects again to some peers."""
        self.close()
        remote, self._remote, self._peers = self._remote, {}, {}
        self._agent = NixlAgent(self._owner)
        self.connect({peer: remote[peer] for peer in peers})

    def close(self) -> None:
        """Afterwards no read writes to this rank's memory."""
        reads, self._reads = self._reads, []
        self._agent.close(reads)
