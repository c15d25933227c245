"""Trainer ranks' memory that really is handed over, and what must not be taken for it."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random

import torch

from fuzz.states import shards_of
from sglang_reshard.memory.mapping import Handles, MemoryExporter, ShmStorage
from sglang_reshard.protocol.validation import check_layout
from sglang_reshard.sources import SourceLayout
from support.drawn import layout_of
from support.plans import values

SEED = 7


@dataclass(frozen=True)
class Exported:
    """One trainer rank of one layout, with shards that stay alive."""

    layout: SourceLayout
    trainer_rank: int
    shards: list[torch.Tensor]
    handles: Handles

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """Inode -> the storage itself."""
        found = {}
        for view, shard in zip(self.handles.shards, self.shards, strict=True):
            handle = self.handles.storages[view.storage] if view.storage >= 0 else None
            if isinstance(handle, ShmStorage):
                found[handle.inode] = shard.untyped_storage()
        return found


def some_exported(count: int) -> list[Exported]:
    """The same in every run."""
    random, found = Random(SEED), []
    while len(found) < count:
        layout = layout_of(random)
        check_layout(layout, layout.trainer_ranks)
        trainer_rank = random.randrange(layout.trainer_ranks)
        shards = shards_of(layout, values(layout, random.getrandbits(32)), trainer_rank, random)
        handles = MemoryExporter(trainer_rank).export(shards)
        if handles.storages:
            found.append(Exported(layout, trainer_rank, shards, handles))
    return found


@contextmanager
def strangers() -> Iterator[list[ShmStorage]]:
    """Descriptors of this process that are no shared memory of anybody's, under their own inodes and sizes.

    A pipe, a device, a folder, a socket, a file on a disk, a pipe with a name, and a file in memory that has one.
    """
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:

        def closed_later(descriptor: int) -> int:
            stack.callback(os.close, descriptor)
            return descriptor

        reader, writer = os.pipe()
        closed_later(writer)
        with socket.socket() as unused:
            sock = os.dup(unused.fileno())
        os.mkfifo(fifo := os.path.join(folder, "fifo"))
        with open(plain := os.path.join(folder, "plain"), "wb") as file:
            file.write(bytes(64))
        named = stack.enter_context(tempfile.NamedTemporaryFile(dir="/dev/shm"))
        os.ftruncate(named.fileno(), 64)
        descriptors = [
            reader,
            sock,
            os.open("/dev/zero", os.O_RDONLY),
            os.open(folder, os.O_RDONLY),
            os.open(plain, os.O_RDONLY),
            os.open(fifo, os.O_RDONLY | os.O_NONBLOCK),
            os.dup(named.fileno()),
        ]
        yield [
            ShmStorage(os.getpid(), closed_later(fd), os.fstat(fd).st_ino, os.fstat(fd).st_size or 64)
            for fd in descriptors
        ]
