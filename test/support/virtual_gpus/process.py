"""Gives this process its virtual GPUs: replaces what the package asks of torch, of the driver and of NCCL."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.engine.context import Phase, UpdateContext, Vote
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.gpu.driver import CudaDriver
from sglang_reshard.gpu.runtime import CudaRuntime, use
from support.virtual_gpus.description import Place, VirtualGpus
from support.virtual_gpus.environment import Environment
from support.virtual_gpus.journal import Journal
from support.virtual_gpus.kernel import VirtualKernel
from support.virtual_gpus.libcuda import VirtualLibcuda
from support.virtual_gpus.memory import VirtualMemory
from support.virtual_gpus.nccl import VirtualNccl
from support.virtual_gpus.nixl import VirtualNixl
from support.virtual_gpus.torch_cuda import VirtualTorchCuda
from support.virtual_gpus.torch_ops import StreamOrder

RECORDER_ENTRIES = 32  # of a flight recorder that is full after few updates: what is kept for it grows no further


class VirtualRuntime(CudaRuntime):
    """The package's own, over virtual torch.cuda and a virtual driver; but tensors are the CPU's to torch."""

    def fabric(self, device: torch.device) -> str:
        return ""

    def storage(self, address: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        found: Any = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), nbytes)
        return found


class VirtualProcess:
    """This process, once `install` has made it one with virtual GPUs."""

    def __init__(self, gpus: VirtualGpus, place: Place, who: str) -> None:
        self.gpus, self.place = gpus, place
        self.journal = Journal(gpus.folder, who)
        self.memory = VirtualMemory(gpus, place, self.journal)
        self.cuda = VirtualTorchCuda(gpus, place, self.memory, self.journal)
        self.library = VirtualLibcuda(gpus, self.memory, place.allocator, self.journal, self.cuda.current_context)
        self.environment = Environment(self.journal)

    def install(self) -> VirtualProcess:
        for name in [n for n in os.environ if "NCCL_" in n]:  # SGLang sets some where it is imported
            del os.environ[name]
        os.environ.update(self.place.environment)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus.uuid(self.place.host, n) for n in self.place.visible)
        self.environment.install()
        self.cuda.install()
        StreamOrder(self.memory).install()
        VirtualNccl(self.gpus, self.place, self.memory, self.journal, self.cuda).install()
        VirtualNixl(self.memory, self.journal).install()
        VirtualKernel(self.memory, self.library, self.cuda, self.journal).install()
        driver = CudaDriver(self.library)
        _replace_everywhere("sglang_reshard.gpu.driver", "cuda_driver", lambda: driver)
        recorded = deque[object](maxlen=RECORDER_ENTRIES)
        _replace_everywhere("sglang_reshard.routes.wire.recorded_works", "RECORDED_WORKS", recorded)
        _replace_everywhere("sglang_reshard.memory.mapping", "host_identity", lambda: self.place.host)
        use(VirtualRuntime())
        self._watch_the_engine()
        return self

    @property
    def device(self) -> torch.device:
        """The process's own."""
        return torch.device("cuda", self.place.own)

    # -- for trainers and models

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Returns a copy in memory of the process's GPU."""
        return self.write(self.memory.tensor(like.shape, like.dtype), like)

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Writes as a kernel does, which ends later."""
        arriving = values.clone()
        self.memory.write_later(self.place.number, [tensor.data_ptr()], lambda: tensor.copy_(arriving))
        return tensor

    def give_memory(self, module: torch.nn.Module) -> None:
        """Moves a module's parameters to the process's GPU, as a model that was built there has them."""
        for parameter in module.parameters():
            parameter.data = self.tensor(parameter.data)

    def pause(self, module: torch.nn.Module) -> None:
        """As a memory saver: the pages of a module's parameters are released, and no others are at their addresses.

        It waits for nothing: work that still uses them finds nothing there.
        """
        for parameter in module.parameters():
            self.memory.pause(parameter.data_ptr())

    def resume(self, module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            self.memory.resume(parameter.data_ptr())

    @contextmanager
    def update(self, unmapped: bool = False) -> Iterator[None]:
        """Around an update, on both sides. `unmapped`: afterwards no memory is mapped, and none kept unused."""
        with self.environment.unchanged("an update"):
            yield
        self.journal.note("answer", mappings=len(self.memory.mappings()), registered=len(self.library.registered))
        if unmapped and (self.memory.mappings() or self.library.registered):
            raise self.journal.broken("memory was still mapped at the answer")
        if unmapped and (kept := self.memory.reserved(self.place.number) - self.memory.allocated(self.place.number)):
            raise self.journal.broken(f"{kept:,} bytes were still kept unused at the answer")

    def until_unmapped(self) -> None:
        """Waits until no process maps this one's memory, nor it others': engine ranks notice a session's end later."""
        end = time.monotonic() + 10
        while (self.memory.mappings() or self.memory.all_mapped_by_others()) and time.monotonic() < end:
            time.sleep(0.02)

    # -- the engine's side of the rules

    def _watch_the_engine(self) -> None:
        _before(UpdateExecutor, "_move", lambda *_: self._sources_are_synchronized())
        votes = "all_gather_votes"
        _before(UpdateContext, votes, lambda _, phase, vote, _mark="": self._own_is_synchronized(phase, vote))
        _before(CopyList, "run", lambda *_: self.cuda.copied(self.place.number))

    def _sources_are_synchronized(self) -> None:
        if writing := self.memory.unsynchronized():
            raise self.journal.broken(f"memory of processes {writing} was read, which had not synchronized their GPU")

    def _own_is_synchronized(self, phase: Phase, vote: Vote) -> None:
        if phase in (Phase.STAGED, Phase.COMMIT) and not vote.error and self.cuda.is_copying():
            raise self.journal.broken(f"the engine rank voted {phase} before its copies had ended")


def _before(owner: Any, name: str, check: Callable[..., None]) -> None:
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args)
        return stock(*args, **kwargs)

    setattr(owner, name, checked)


def _replace_everywhere(owner: str, name: str, value: Any) -> None:
    """Replaces what the module `owner` defines, and what modules have imported of it."""
    importlib.import_module(owner)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("sglang_reshard") and name in vars(module):
            setattr(module, name, value)
