"""verl's usual way to disaggregated engines, over gloo: gathered on trainer rank 0, broadcast whole in buckets.

verl's "nccl" backend works like this and needs GPUs. This one is a yardstick for hosts without:

    checkpoint_engine.backend=gloo_rank0  checkpoint_engine.custom_backend_module=benchmark.verl.rank0_broadcast

Trainer ranks other than the first only take part in gathering each tensor. Every engine rank's worker gets
every tensor in full.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from sglang_reshard.extras.parameter_stream import buckets, packed

BACKEND = "gloo_rank0"
_TIMEOUT = timedelta(seconds=120)
_Item: TypeAlias = tuple[str, torch.dtype, torch.Size]


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
        for bucket in buckets(weights, self.bucket_size):
            self._broadcast_items([(name, tensor.dtype, tensor.shape) for name, tensor in bucket])
            data = packed(bucket).view(-1).view(torch.uint8)
            self._broadcast(data)
            self.sent_bytes += len(data)
        self._broadcast_items([])
        return {"rank0_broadcast/sent_bytes": float(self.sent_bytes)}

    async def receive_weights(  # type: ignore[override]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while items := self._broadcast_items():
            sizes = [shape.numel() * dtype.itemsize for _, dtype, shape in items]
            data = torch.empty(sum(sizes), dtype=torch.uint8)
            self._broadcast(data)
            self.received_bytes += len(data)
            for (name, dtype, shape), part in zip(items, data.split(sizes), strict=True):
                yield name, part.view(dtype).view(shape)

    def _broadcast(self, data: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([data], options).wait()

    def _broadcast_items(self, items: list[_Item] | None = None) -> list[_Item]:
        """The sender's; others give none."""
        pickled = b"" if items is None else pickle.dumps(items)
        length = torch.tensor([len(pickled)])
        self._broadcast(length)
        data = torch.frombuffer(bytearray(pickled or int(length)), dtype=torch.uint8)
        self._broadcast(data)
        return pickle.loads(data.numpy().tobytes())
