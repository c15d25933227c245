"""What trainer ranks and stand-in engine ranks do on virtual GPUs: updates of the toy model to one or more engines."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sglang_reshard import tasks
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import TracedModel
from sglang_reshard.errors import ReshardError
from sglang_reshard.extras.asynchronous import background
from sglang_reshard.observability.report import UpdateReport
from support.several_engines import sends_of, several_engines_sender
from support.toy import DRIFTING, ToyRank, checkpoint
from support.virtual_gpus.process import VirtualProcess
from support.world import Requests, Trainer

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Job:
    """One shape, and how its weights live.

    mesh         of the trainer ranks: (8,) is FSDP, (2, 4) HSDP
    tp           ranks of each engine
    updates      how many
    drift        a version differs little from the one before
    offloaded    shards are in host memory of trainers that use a GPU
    moves        shards' memory is freed right after each update, and other memory is allocated
    saver        a memory saver releases the pages of engine ranks' live weights between updates, and maps others
    live_moves   engine ranks free and allocate their live weights between updates
    segment      bytes of the one allocation that has all shards of a trainer rank; 0 for one allocation each
    held         look after each update what the process holds, and keep no reports; else after the last one
    options      of the sender, `update_options` of each update
    """

    mesh: tuple[int, ...] = (8,)
    tp: int = 1
    updates: int = 2
    drift: bool = False
    offloaded: bool = False
    moves: bool = False
    saver: bool = False
    live_moves: bool = False
    segment: int = 0
    held: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    update_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """What a process holds: objects that Python's collector tracks, descriptors, shared mappings, and in bytes
    allocations on its GPU, mappings of others', and what is resident.
    """

    objects: int
    descriptors: int
    mappings: int
    allocated: int
    mapped: int
    registered: int
    resident: int

    @classmethod
    def of(cls, process: VirtualProcess) -> Held:
        gc.collect()
        return cls(
            len(gc.get_objects()),
            len(os.listdir("/proc/self/fd")),
            sum("(deleted)" in line or process.gpus.folder in line for line in open("/proc/self/maps")),
            process.memory.reserved(process.place.number),
            sum(m.nbytes for m in process.memory.mappings()),
            sum(process.library.registered.values()),
            psutil.Process().memory_info().rss,
        )


@dataclass
class Trained:
    """What a trainer rank has seen: reports by update and engine, and what it held after each update."""

    reports: list[dict[str, UpdateReport]] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


def settle_interned_strings() -> None:
    """Lets CPython make its table of them anew, megabytes larger, as it does once many have come and gone."""
    for number in range(400_000):
        sys.intern(f"nobody keeps {number}")


class Shards:
    """DTensors of a version of the toy's checkpoint, whose local tensors are in this rank's GPU memory."""

    def __init__(self, process: VirtualProcess, job: Job) -> None:
        self._process, self._job = process, job
        self._mesh = init_device_mesh("cpu", job.mesh)
        self._placements = [*[Replicate()] * (len(job.mesh) - 1), Shard(0)]
        self.named = {name: self._distributed(tensor) for name, tensor in checkpoint(0, DTYPE).items()}
        self.move()

    def become(self, version: int) -> None:
        """Written in place, as an optimizer writes."""
        for name, tensor in checkpoint(version, DTYPE).items():
            self._write(self.named[name]._local_tensor, self._distributed(tensor)._local_tensor)

    def move(self) -> None:
        """Other memory, with the same values; the old is freed."""
        old = {name: tensor._local_tensor.cpu() for name, tensor in self.named.items()}
        for tensor in self.named.values():
            tensor._local_tensor = torch.empty(0, dtype=DTYPE)
        gc.collect()
        together = self._process.memory.segment(self._job.segment) if self._job.segment else nullcontext()
        with together:
            for name, tensor in self.named.items():
                tensor._local_tensor = old[name].clone() if self._job.offloaded else self._process.tensor(old[name])

    def _distributed(self, tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor, self._mesh, self._placements, src_data_rank=None)

    def _write(self, local: torch.Tensor, values: torch.Tensor) -> None:
        if self._job.offloaded:
            local.copy_(values)
        else:
            self._process.write(local, values)


def train(trainer: Trainer, process: VirtualProcess, job: Job) -> Trained:
    process.cuda.synchronize(process.device)  # a trainer has used its GPU
    sender, _host = several_engines_sender(trainer, timeout_s=30, **job.options)
    sender.set_engines(sends_of(trainer, [job.tp] * (len(trainer.send_one) // job.tp)))
    shards = Shards(process, job)
    trained = Trained()
    if job.held:
        settle_interned_strings()
    for version in range(1, job.updates + 1):
        shards.become(version + job.drift * DRIFTING)
        with process.update():
            reports = sender.update(shards.named.items(), weight_version=str(version), **job.update_options)
        if not job.held:  # a thousand reports would be what grows
            trained.reports.append(reports)
        if job.moves:
            sender.release()
            shards.move()  # at once: nobody may still read the old memory
        if job.held or version == job.updates:
            trained.held.append(Held.of(process))
    sender.close()
    process.until_unmapped()
    return trained


def train_through_failures(
    trainer: Trainer, process: VirtualProcess, transport: str, updates: int = 3, **options: Any
) -> list[str]:
    """What became of each update, with these `options`."""
    process.cuda.synchronize(process.device)
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=8, transport=transport)
    shards = Shards(process, Job((trainer.size,)))
    told = []
    for version in range(1, updates + 1):
        shards.become(version)
        try:
            with process.update():
                sender.update(shards.named.items(), weight_version=str(version), **options)
            told.append("updated")
        except ReshardError as error:
            told.append(f"{type(error).__name__}: {error}")
    sender.close()
    process.until_unmapped()
    return told


def train_in_background(trainer: Trainer, process: VirtualProcess, job: Job) -> list[UpdateReport | None]:
    """Updates behind the trainer's next step, in which it changes the weights, and captures a graph.

    The update's thread begins with the capture, which lasts until the update has ended.
    """
    capturing = threading.Event()

    def start_while_capturing(name: str, call: Callable[[], Any], **options: Any) -> Any:
        return tasks.start(name, lambda: (capturing.wait(), call())[1], **options)

    background.tasks = SimpleNamespace(start=start_while_capturing)  # type: ignore[assignment]
    process.cuda.synchronize(process.device)
    sender = WeightSender.over(trainer.group, trainer.send, timeout_s=30, **job.options)
    shards, reports = Shards(process, job), []
    for version in range(1, job.updates + 1):
        shards.become(version)
        handle = sender.update_async(shards.named.items(), weight_version=str(version), **job.update_options)
        shards.become(1000 + version)
        with process.memory.captures.capture():
            capturing.set()
            while not handle.done():
                time.sleep(0.005)
        capturing.clear()
        reports.append(handle.wait())
    sender.close()
    process.until_unmapped()
    return reports


@dataclass
class Served:
    """What an engine rank has seen: parameters that differ from stock loading, by version; what it held after each."""

    differing: list[tuple[str, str]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


def serve(rank: int, _size: int, requests: Requests, process: VirtualProcess, job: Job) -> Served:
    own = rank % job.tp
    model = ToyRank(own, job.tp, DTYPE)
    process.give_memory(model)
    process.memory.keeps_unused = True  # as an engine's allocator does
    process.cuda.synchronize(process.device)
    receiver = WeightReceiver(TracedModel(model), own, job.tp, process.device)
    served = Served()
    if job.held:
        settle_interned_strings()
    for request in requests:
        with process.update(unmapped=request.unmap_after):
            output = receiver.update(request)
        if job.held or request.weight_version == str(job.updates):
            served.held.append(Held.of(process))  # before the answer: the trainer ends the session after it
        requests.answer(output)
        if output.success:
            check_weights(model, request.weight_version or "", served, job.drift)
        if job.saver and request.weight_version != str(job.updates):  # the session ends after the last
            receiver.release_pages()
            process.pause(model)
            process.resume(model)
        if job.live_moves:  # as memory is released and resumed without a memory saver
            kept = {name: parameter.data.cpu() for name, parameter in model.named_parameters()}
            for parameter in model.parameters():
                parameter.data = torch.empty(0, dtype=DTYPE)
            for name, parameter in model.named_parameters():
                parameter.data = process.tensor(kept[name])
            process.cuda.synchronize(process.device)
    process.until_unmapped()
    return served


def check_weights(model: ToyRank, version: str, served: Served, drift: bool = False) -> None:
    """Compares a model with what stock loading of that version makes of it."""
    served.versions.append(version)
    served.differing += [(version, n) for n in model.differing(checkpoint(int(version) + drift * DRIFTING, DTYPE))]
