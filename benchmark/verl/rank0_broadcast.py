"""verl's usual way to disaggregated engines, over gloo: gathered on trainer rank 0, broadcast whole in buckets.

verl's "nccl" backend works like this and needs GPUs. This one is a yardstick for hosts without:

    checkpoint_engine.backend=gloo_rank0  checkpoint_engine.custom_backend_module=benchmark.verl.rank0_broadcast

Trainer ranks other than the first only take part in gathering each tensor. Every engine rank's worker gets
every tensor in full.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

BACKEND = "gloo_rank0"
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class _Item:
    """A tensor's place in a bucket. offset, in bytes"""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@CheckpointEngineRegistry.register(BACKEND)
class Rank0Broadcast(CheckpointEngine):
    """bucket_size: bytes of tensors that travel together; a tensor that is larger travels alone.

    sent_bytes, received_bytes  of weights, in the last update
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self.sent_bytes = self.received_bytes = 0
        self._store: dist.TCPStore | None = None
        self._group: Any = None

    def prepare(self) -> dict[str, Any]:
        """Every update has a store and a group of its own, as engines may come and go between updates."""
        self.sent_bytes = self.received_bytes = 0
        if not self.is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        size = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "size": [size] * len(ranks), "master": [metadata[0]] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, size)))

    def init_process_group(self, **kwargs: Any) -> None:
        """`kwargs`: this worker's part of `build_topology`."""
        rank, size, master = kwargs["rank"], kwargs["size"], kwargs["master"]
        if rank < 0:
            return
        if self._store is None:
            self._store = dist.TCPStore(master["host"], master["port"], is_master=False, timeout=_TIMEOUT)
        self._group = dist.ProcessGroupGloo(self._store, rank, size, timeout=_TIMEOUT)

    def finalize(self) -> None:
        self._group = self._store = None

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        if self._group is None:
            for _ in weights:  # each is gathered as it is asked for, by all trainer ranks together
                pass
            return {}
        for bucket in _buckets(weights, self.bucket_size):
            items = _places(bucket)
            data = torch.empty(items[-1].end, dtype=torch.uint8)
            for item, (_, tensor) in zip(items, bucket, strict=True):
                data[item.offset : item.end] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._broadcast_items(items)
            self._broadcast(data)
            self.sent_bytes += len(data)
        self._broadcast_items([])
        return {"rank0_broadcast/sent_bytes": float(self.sent_bytes)}

    async def receive_weights(  # type: ignore[override]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while items := self._broadcast_items():
            data = torch.empty(items[-1].end, dtype=torch.uint8)
            self._broadcast(data)
            self.received_bytes += len(data)
            for item in items:
                yield item.name, data[item.offset : item.end].view(item.dtype).view(item.shape)

    def _broadcast(self, data: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([data], options).wait()

    def _broadcast_items(self, items: list[_Item] | None = None) -> list[_Item]:
        """The sender's; others give none."""
        packed = b"" if items is None else pickle.dumps(items)
        length = torch.tensor([len(packed)])
        self._broadcast(length)
        data = torch.frombuffer(bytearray(packed or int(length)), dtype=torch.uint8)
        self._broadcast(data)
        return pickle.loads(data.numpy().tobytes())


def _buckets(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in weights:
        if bucket and used + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append((name, tensor))
        used += _aligned(tensor.nbytes)
    if bucket:
        yield bucket


def _places(bucket: list[tuple[str, torch.Tensor]]) -> list[_Item]:
    items, offset = [], 0
    for name, tensor in bucket:
        items.append(_Item(name, tensor.dtype, tuple(tensor.shape), offset))
        offset += _aligned(tensor.nbytes)
    return items


def _aligned(nbytes: int) -> int:
    """So that a tensor of any dtype can be a view of its part of the bucket."""
    return -(-nbytes // 16) * 16
