"""An engine rank's NIXL agent: reads the registered memory of other ranks, which are named as errors name them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reshard.errors import Mismatch, PeerDisconnected
from sglang_reshard.routes.nixl.agent import NixlAgent
from sglang_reshard.routes.nixl.remote_shards import RemoteShard, RemoteShards
from sglang_reshard.routes.nixl.source import storage_range


class NixlReader(NixlAgent):
    """Reads from peers, "trainer rank 0" or "engine rank 1 of replica 0"."""

    def __init__(self, engine_rank: int) -> None:
        """Raises Unsupported without NIXL."""
        super().__init__(f"engine rank {engine_rank}")
        self._aborted = threading.Event()
        self._peers: dict[str, str] = {}  # the names of their agents
        self._remote: dict[str, RemoteShards] = {}
        self._reads: list[Any] = []

    def connect(self, remote: Mapping[str, RemoteShards]) -> None:
        """Learns the memory of peers; opens no connection yet."""
        for peer, shards in remote.items():
            with self._errors(f"use the NIXL metadata of {peer}"):
                added = self._agent.add_remote_agent(shards.metadata)
            if not added:
                raise Mismatch(
                    f"{self._owner} cannot use the NIXL metadata of {peer}. Do both have the same nixl version?"
                )
            self._peers[peer] = added.decode() if isinstance(added, bytes) else str(added)
        self._remote.update(remote)

    def shard(self, peer: str, tensor: int) -> RemoteShard:
        """Returns where a peer has its shard of its layout's tensor number `tensor`."""
        return self._remote[peer].shards[tensor]

    def register(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Makes local memory one that can be read into."""
        unique = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
        self.register_ranges([storage_range(storage) for storage in unique.values()])

    def prepare(self, peer: str, remote: tuple[str, np.ndarray], local: tuple[str, np.ndarray]) -> Any:
        """Returns a read that can be started any number of times; it has (address, bytes, GPU) rows on either side."""
        with self._errors(f"prepare a read from {peer}"):
            to, of = (self._agent.get_xfer_descs(rows.astype(np.uint64), kind) for kind, rows in (local, remote))
            read = self._agent.initialize_xfer("READ", to, of, self._peers[peer], b"")
        self._reads.append(read)
        return read

    def release(self, reads: Sequence[Any]) -> None:
        """Frees reads that have ended, and will not be started again."""
        for read in reads:
            self._reads.remove(read)
            with self._errors("free a read"):
                read.release()

    def start(self, peer: str, reads: Sequence[Any]) -> None:
        with self._errors(f"read from {peer}"):
            for read in reads:
                if self._agent.transfer(read) == "ERR":
                    raise self._failed("read", peer)

    def are_done(self, peer: str, reads: Sequence[Any]) -> bool:
        """Returns whether reads have ended. Raises PeerDisconnected if one failed, or after `abort`."""
        if self._aborted.is_set():
            raise PeerDisconnected(f"{self._owner} stopped reading from {peer}: the update was aborted")
        with self._errors(f"read from {peer}"):
            for read in reads:
                state = self._agent.check_xfer_state(read)
                if state == "ERR":
                    raise self._failed("finish reading", peer)
                if state != "DONE":
                    return False
        return True

    def _failed(self, what: str, peer: str) -> PeerDisconnected:
        return PeerDisconnected(
            f"{self._owner} could not {what} from {peer}: NIXL reported an error; look at the log of {peer}"
        )

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
        self._open()
        self.connect({peer: remote[peer] for peer in peers})

    def close(self) -> None:
        """Ends the agent. Afterwards no read writes to this rank's memory, even one that had not ended."""
        reads, self._reads = self._reads, []
        for read in reads:
            with contextlib.suppress(Exception):  # one that is under way ends with the agent
                read.release()
        self._agent = None
