"""SGLang's way from a trainer that is rank 0 of a process group with all engine ranks."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.patches.launch import without_torchrun_variables
from sglang_reshard.selftest.children import free_port


class UpdateGroup:
    """A group of this process and an engine's ranks, under a name that it may have again once it was destroyed."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine, self._name = engine, name
        self._group: Any = None

    def make(self) -> Any:
        from sglang.srt.utils import init_custom_process_group

        port = free_port()
        size = 1 + self._engine.server_args.tp_size

        def join() -> None:
            self._group = init_custom_process_group(
                backend="gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=size,
                rank=0,
                group_name=self._name,
            )

        def joined() -> Any:
            return self._engine.init_weights_update_group("127.0.0.1", port, 1, size, self._name, "gloo")

        with without_torchrun_variables():  # they say that torchrun keeps the store of every group
            return _beside(join, joined)

    def send(self, weights: dict[str, torch.Tensor], **options: Any) -> Any:
        tensors = list(weights.values())
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
        shapes = [list(t.shape) for t in tensors]
        if options.get("load_format") == "flattened_bucket":
            tensors = [torch.cat([t.flatten().view(torch.uint8) for t in tensors])]

        def broadcast() -> None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=self._group)

        def received() -> Any:
            return self._engine.update_weights_from_distributed(list(weights), dtypes, shapes, self._name, **options)

        return _beside(broadcast, received)

    def destroy(self) -> Any:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        return self._engine.destroy_weights_update_group(self._name)


def _beside(trainer_side: Any, engine_side: Any) -> Any:
    """What the engine answers while the trainer does its part."""
    thread = threading.Thread(target=trainer_side, daemon=True)
    thread.start()
    answer = engine_side()
    thread.join(timeout=60)
    assert not thread.is_alive()
    return answer
