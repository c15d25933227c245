"""Registers a CPU platform with verl, through verl's own hook for platforms. Imported by verl, not by this package.

`VERL_USE_EXTERNAL_MODULES`, set by `verl_settings.environment`, names this module, so that `import verl` imports it in
every process before verl selects a device. It registers a platform named "cpu" and works around four things that verl
and SGLang do there that only work on a GPU. Nothing installed is modified, and on a host with a GPU the import fails.
"""

from __future__ import annotations

import functools
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.multiprocessing
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA

from sglang_reshard.testing.cpu_host import leave_reductions_alone, refuse_gpu


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing: host memory has no streams, no allocator that caches and no profiler."""


class _TorchCpu(ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls: memory is that of the process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return "CPU"

    @staticmethod
    def memory_allocated(*_: Any) -> int:
        return psutil.Process().memory_info().rss

    memory_reserved = memory_allocated

    @staticmethod
    def max_memory_allocated(*_: Any) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_allocated

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        """Returns (free, total) bytes of the host."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def get_rng_state(*_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    empty_cache = ipc_collect = staticmethod(_nothing)


_TORCH_CPU = _TorchCpu("sglang_reshard.testing.cpu_host.torch_cpu")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformCUDA):
    """A verl platform with host memory and gloo.

    To Ray its devices are GPUs: it counts them, `ray.init(num_gpus=...)`, and numbers them for workers in
    CUDA_VISIBLE_DEVICES, where verl reads them.
    """

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _TORCH_CPU

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"  # verl passes it to Tensor.to(), where a number means a GPU

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def communication_backend_name(self) -> str:
        return "gloo"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def is_ipc_supported(self) -> bool:
        return False

    set_device = synchronize = empty_cache = set_allocator_settings = profiler_start = profiler_stop = cudart = _nothing


def _name_gloo_once() -> None:
    """Makes verl request "cpu:gloo" once: on the CPU it requests "cpu:gloo,cpu:gloo", which torch rejects."""
    import verl.utils.distributed

    original = verl.utils.distributed.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "cpu:gloo")

    verl.utils.distributed.initialize_global_process_group_ray = initialize


def _let_fsdp1_synchronize_on_the_host() -> None:
    """Lets FSDP1 broadcast rank 0's parameters at its start (`sync_module_states`, which verl sets) over gloo.

    torch refuses host memory there, as NCCL would.
    """
    from torch.distributed.fsdp import _init_utils

    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None


def _share_by_name() -> None:
    """Makes SGLang's schedulers open tensors by name.

    By default torch passes file descriptors over a socket whose key only the sender's own children have:
    "AuthenticationError".
    """
    torch.multiprocessing.set_sharing_strategy("file_system")


refuse_gpu("verl_platform", "Remove it from VERL_USE_EXTERNAL_MODULES, and unset VERL_PLATFORM.")
_name_gloo_once()
leave_reductions_alone()
_let_fsdp1_synchronize_on_the_host()
_share_by_name()
