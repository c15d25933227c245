"""TorchRL: FSDP2 trainer ranks send their shards to a `Collector` in another process, on CPU.

    make setup-torchrl
    PYTHONPATH=.venv/torchrl .venv/bin/python examples/torchrl_collector.py

`ReshardWeightSyncScheme` is used as TorchRL's own schemes are: `init_on_sender`, `connect` and `send` on the trainer
ranks, `register_scheme_receiver` and `receive` around the collector. Those send whole tensors of one process. This one
sends each rank's shards, and nothing is gathered.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchrl.collectors import Collector
from torchrl.envs import PendulumEnv
from torchrl.weight_update import WeightSyncScheme

from sglang_reshard import ModuleReceiver, ModuleSender

TRAINERS, STEPS = 2, 3


class SenderTransport:
    """All workers' end on one trainer rank. Every method is collective over the trainer ranks."""

    def __init__(self, sender: ModuleSender, model: nn.Module, num_workers: int) -> None:
        self.sender, self.model, self.num_workers = sender, model, num_workers
        self.version = 0

    def setup_connection_and_weights_on_sender(self) -> None:
        self.sender.wait_for_receivers(self.num_workers)
        self.send_weights(self.model)

    def send_weights(self, weights: Any) -> None:
        """Returns when all workers have applied the weights: a module, or names and tensors or DTensors."""
        self.sender.update(weights, weight_version=str(self.version))
        self.version += 1


class ReceiverTransport:
    """A worker's end."""

    def __init__(self, receiver: ModuleReceiver) -> None:
        self.receiver = receiver

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> None:
        """Waits for the first weights."""
        self.receiver.receive()

    def receive_weights(self, timeout: float | None = None, *, weights: Any = None, **_: Any) -> Any | None:
        """Returns the model's weights once new ones have been applied; None at the timeout."""
        return None if self.receiver.receive(timeout) is None else weights


class ReshardWeightSyncScheme(WeightSyncScheme):
    """Gives workers the weights of a model whose parameters may be DTensors, FSDP2's among them.

    Workers get a copy by pickle after `init_on_sender`. Its holder can join the session, so keep it private.
    """

    metadata = ""

    def _init_on_sender_impl(self, *, model_id: str, model: nn.Module, num_workers: int) -> None:
        self.model_id, self.model = model_id, model
        sender = ModuleSender()
        self.metadata = sender.metadata
        self.shared_transport: Any = SenderTransport(sender, model, num_workers)

    def _init_on_receiver_impl(self, *, model_id: str, context: Any, worker_idx: int | None = None) -> None:
        self.model_id, self.context, self.worker_idx = model_id, context, worker_idx
        receiver = ModuleReceiver(self.model)  # the collector's
        receiver.init(self.metadata)
        self.shared_transport = ReceiverTransport(receiver)

    def create_transport(self, **_: Any) -> Any:
        raise NotImplementedError("one transport serves all workers, see init_on_sender and init_on_receiver")

    def prepare_weights(self, weights: Any, *_: Any, **__: Any) -> Any:
        """Leaves shards as they are, where TorchRL's default makes a TensorDict of whole tensors."""
        if weights is None:
            return self.model
        if isinstance(weights, TensorDictBase):
            return list(weights.flatten_keys(".").items())
        return list(weights.items()) if isinstance(weights, dict) else weights

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        if worker_ids is not None:
            raise ValueError("all workers get new weights together; leave worker_ids out")
        super().send(weights)

    def shutdown(self) -> None:
        """On the trainer ranks, collective."""
        transport, self._shared_transport = self._shared_transport, None
        if isinstance(transport, SenderTransport):
            transport.sender.close()
        elif transport is not None:
            transport.receiver.close()
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_shared_transport": None}


class Torque(nn.Module):
    """A policy for the pendulum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1), nn.Tanh())
        self.register_buffer("limit", torch.tensor(2.0))

    def forward(self, angle: torch.Tensor, speed: torch.Tensor) -> torch.Tensor:
        return self.net(torch.stack([angle.cos(), angle.sin(), speed], -1)) * self.limit


def policy(seed: int) -> TensorDictModule:
    torch.manual_seed(seed)
    return TensorDictModule(Torque(), in_keys=["th", "thdot"], out_keys=["action"])


def checksum(model: nn.Module) -> float:
    state = model.state_dict().values()
    return sum(float((t.full_tensor() if isinstance(t, DTensor) else t).double().sum()) for t in state)


def train(rank: int, port: int, schemes: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(TRAINERS))
    dist.init_process_group("gloo")
    model = policy(seed=0)
    fully_shard(model.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheme = ReshardWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    if rank == 0:
        schemes.put(scheme)
    scheme.connect()
    for step in range(1, STEPS + 1):
        angle, speed = torch.randn(2, 32)
        (model.module(angle, speed).squeeze(-1) + angle).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheme.send()
        total = checksum(model)
        if rank == 0:
            print(f"trainer: step {step}, checksum {total:.12g}", flush=True)
    scheme.shutdown()
    dist.destroy_process_group()


def collect(schemes: Any) -> None:
    collector = Collector(PendulumEnv(), policy(seed=1), frames_per_batch=20, total_frames=-1)
    scheme = schemes.get()
    collector.register_scheme_receiver({"policy": scheme})  # waits for the first weights
    step = 0
    for batch in collector:
        reward = batch["next", "reward"].mean()
        if scheme.receive(timeout=0.0) is not None:
            step += 1
            total = checksum(collector.policy)
            print(f"collector: step {step}, checksum {total:.12g}, mean reward before {reward:.3f}", flush=True)
        if step == STEPS:
            break
    scheme.shutdown()
    collector.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    context = mp.get_context("forkserver")  # imports once for all three processes
    context.set_forkserver_preload(["torchrl.collectors", "torch.distributed.fsdp", "sglang_reshard"])
    queue, port = context.Queue(), free_port()
    processes = [context.Process(target=train, args=(rank, port, queue)) for rank in range(TRAINERS)]
    processes.append(context.Process(target=collect, args=(queue,)))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(max(process.exitcode or 0 for process in processes))
