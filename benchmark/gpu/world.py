"""Trainer ranks and engine ranks on one GPU, without SGLang: the real sender and receiver, and a made-up model.

Every element is a small whole number that follows from its place and the version, exact in bfloat16: any process can
say what any other must hold.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmark.gpu import sharing
from benchmark.gpu.item import Bench
from benchmark.gpu.peer import Here, everywhere
from benchmark.gpu.place import DEVICE, free_bytes
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.layout.regions import Box
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, decode, encode
from sglang_reshard.sources import blocks

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Model:
    """`layers` times a fused pair of [hidden, hidden], split by rows, one split by columns, and a vector.

    trained, served  dtypes of the trainer's shards and of the engine's weights
    """

    layers: int
    hidden: int
    trained: str = "bfloat16"
    served: str = "bfloat16"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        square = (self.hidden, self.hidden)
        kinds = {"gate": square, "up": square, "down": square, "norm": (self.hidden,)}
        return {f"{i}.{kind}": shape for i in range(self.layers) for kind, shape in kinds.items()}

    @property
    def nbytes(self) -> int:
        return self.layers * (3 * self.hidden + 1) * self.hidden * getattr(torch, self.served).itemsize


def values(version: int, name: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Returns what `box` of a tensor holds in a version."""
    number = sum(map(ord, name)) + 7 * version
    if len(shape) == 1:
        return ((_range(box.start[0], box.stop[0]) * 3 + number) % 251).to(dtype)
    rows, columns = (_range(a, b) for a, b in zip(box.start, box.stop, strict=True))
    return ((rows[:, None] * 31 + columns[None, :] * 7 + number) % 251).to(dtype)


def _range(begin: int, end: int) -> torch.Tensor:
    return torch.arange(begin, end, dtype=torch.int32, device=DEVICE)


class EngineRank(torch.nn.Module):
    """One engine rank's parameters and loader."""

    def __init__(self, model: Model, rank: int, size: int) -> None:
        super().__init__()
        self.model, self.rank, self.size = model, rank, size
        part = model.hidden // size
        live = {"gate_up": (2 * part, model.hidden), "down": (model.hidden, part), "norm": (model.hidden,)}
        for i in range(model.layers):
            for name, shape in live.items():
                empty = torch.zeros(shape, dtype=getattr(torch, model.served), device=DEVICE)
                self.register_parameter(f"{i}_{name}", torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights: Any) -> None:
        part = self.model.hidden // self.size
        first = self.rank * part
        for name, loaded in weights:
            layer, _, kind = name.partition(".")
            if kind == "norm":
                self.live(layer, "norm").copy_(loaded)
            elif kind == "down":
                self.live(layer, "down").copy_(loaded.narrow(1, first, part))
            else:
                begin = 0 if kind == "gate" else part
                self.live(layer, "gate_up").narrow(0, begin, part).copy_(loaded.narrow(0, first, part))

    def live(self, layer: str, name: str) -> torch.Tensor:
        found: torch.Tensor = getattr(self, f"{layer}_{name}").data
        return found

    def wrong(self, version: int) -> list[str]:
        """Returns the names of parameters that are not those of a version, to the bit."""
        other = EngineRank(self.model, self.rank, self.size)
        other.load_weights(expected(self.model, version))
        return [n for n, p in self.named_parameters() if not torch.equal(p.data, getattr(other, n).data)]


def expected(model: Model, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all tensors of a version, one at a time."""
    for name, shape in model.shapes().items():
        yield name, values(version, name, shape, Box.whole(shape), getattr(torch, model.trained))


# -- the trainer's side; `here.kept` has sender, state


def join(here: Here, rank: int, size: int, rendezvous: str, engines: tuple[str, ...], options: dict[str, Any]) -> None:
    """Joins the trainer ranks' group, and opens a session with the engine that listens at these addresses."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    links = [Client(address, "AF_UNIX") for address in engines] if rank == 0 else []
    send = (lambda request: _ask(links, request)) if rank == 0 else None
    assert dist.group.WORLD is not None
    here.kept.update(rank=rank, size=size, links=links)
    here.kept["sender"] = WeightSender.over(dist.group.WORLD, send, timeout_s=_TIMEOUT_S, **options)


def _ask(links: list[Connection], request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
    for link in links:
        link.send_bytes(encode(request))
    outputs = [decode(link.recv_bytes(), DistributedUpdateWeightsOutput) for link in links]
    assert all(output == outputs[0] for output in outputs), f"engine ranks answered differently: {outputs}"
    return outputs[0]


def become(here: Here, model: Model, version: int, anew: bool = False) -> None:
    """Writes a version into this rank's shards. anew: into other memory; the old is freed before."""
    rank, size = here.kept["rank"], here.kept["size"]
    if anew:
        here.kept.pop("state", None)
        free_bytes()
    state = here.kept.setdefault("state", {})
    for name, shape in model.shapes().items():
        boxes = [_rows(shape, r, size) for r in range(size)]
        mine = values(version, name, shape, boxes[rank], getattr(torch, model.trained))
        if name not in state:
            state[name] = torch.empty(mine.shape, dtype=mine.dtype, device=DEVICE), blocks(shape, boxes)
        state[name][0].copy_(mine)
    del mine
    free_bytes()


def _rows(shape: tuple[int, ...], rank: int, size: int) -> Box:
    part = -(-shape[0] // size)
    start = (rank * part, *(0 for _ in shape[1:]))
    return Box(start, (min((rank + 1) * part, shape[0]), *shape[1:]))


def update(here: Here, version: int, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of the report."""
    begin = time.perf_counter()
    given = [(name, shard, sharding) for name, (shard, sharding) in here.kept["state"].items()]
    report = here.kept["sender"].update(given, weight_version=str(version), **options)
    return {
        "transport": report.transport,
        "reason": report.transport_reason,
        "seconds": time.perf_counter() - begin,
        "phases": report.seconds,
        "received": sum(rank.received_bytes for rank in report.engine_ranks),
        "least": sum(rank.least_bytes for rank in report.engine_ranks),
        "peak_extra": max(rank.peak_extra_bytes for rank in report.engine_ranks),
    }


def leave(here: Here) -> None:
    here.kept["sender"].close()
    for link in here.kept["links"]:
        with contextlib.suppress(BrokenPipeError):
            link.send_bytes(b"")


# -- the engine's side


def listen(here: Here) -> str:
    here.kept["listener"] = listener = Listener(None, "AF_UNIX")
    address: str = str(listener.address)
    return address


def serve(here: Here, model: Model, rank: int, size: int, check_every: int) -> dict[str, Any]:
    """Answers requests until there are no more. Returns what was wrong, and the most memory that an update took."""
    engine = EngineRank(model, rank, size)
    receiver = WeightReceiver(TracedModel(engine), rank, size, DEVICE)
    addresses = [p.data_ptr() for p in engine.parameters()]
    link = here.kept["listener"].accept()
    wrong, failed, peaks = list[str](), list[str](), list[int]()
    while data := link.recv_bytes():
        request = decode(data, DistributedUpdateWeightsReq)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        output = receiver.update(request)
        peaks.append(torch.cuda.max_memory_allocated(DEVICE) - before)
        if not output.success:
            failed.append(output.message)
        elif request.update % check_every == 0:
            wrong += [
                f"version {request.weight_version}: {name}" for name in engine.wrong(int(request.weight_version or 0))
            ]
        free_bytes()  # so that torch keeps nothing of what it was compared with, see `World.free_bytes`
        link.send_bytes(encode(output))
    if addresses != [p.data_ptr() for p in engine.parameters()]:
        wrong.append("parameters have moved")
    return {"wrong": wrong, "failed": failed, "allocator_peak": max(peaks, default=0)}


# -- both


class World:
    """Trainer ranks and engine ranks; to be made before the item uses the GPU, if it does."""

    def __init__(self, bench: Bench, model: Model, trainers: int = 2, engines: int = 2) -> None:
        self.model = model
        self.trainers = [bench.peer(f"trainer rank {rank}") for rank in range(trainers)]
        self.engines = [bench.peer(f"engine rank {rank}") for rank in range(engines)]

    @contextlib.contextmanager
    def session(self, check_every: int = 1, **options: Any) -> Iterator[list[dict[str, Any]]]:
        """Opens one for the block. The list has what each engine rank has seen, once the block has ended."""
        found: list[dict[str, Any]] = []
        addresses = tuple(engine.call(listen) for engine in self.engines)
        for rank, engine in enumerate(self.engines):
            engine.start(serve, self.model, rank, len(self.engines), check_every)
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = str(Path(folder, "trainers"))
            everywhere(self.trainers, join, len(self.trainers), rendezvous, addresses, options, ranked=True)
            yield found
            everywhere(self.trainers, leave)
        found += [engine.result() for engine in self.engines]

    def become(self, version: int, anew: bool = False) -> None:
        everywhere(self.trainers, become, self.model, version, anew)

    def update(self, version: int, **options: Any) -> dict[str, Any]:
        """Returns the figures of trainer rank 0."""
        found: dict[str, Any] = everywhere(self.trainers, update, version, options)[0]
        return found

    def free_bytes(self) -> int:
        """Returns what all processes leave of the GPU between two updates, when none of them computes.

        The last trainer rank that returns its unused memory sees the most.
        """
        return max(everywhere(self.trainers, sharing.free))
