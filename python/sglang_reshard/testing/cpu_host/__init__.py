"""Lets stock SGLang run on a host without a GPU; refuses to be used on a host with one.

SGLang serves on CPUs with its AMX build. The wheel on PyPI is the CUDA build, which does not start without a GPU for
four reasons: it imports `sgl_kernel`, whose binary needs `libcuda.so.1`; it starts NCCL; it requires one NUMA node per
TP rank; and it compiles kernels at the first request. Nothing installed is modified. A stub of `sgl_kernel` comes first
on PYTHONPATH, so that the spawned schedulers find it too, and the rest is environment variables that SGLang reads.

    cpu_host.activate(tp_size=2)      # before anything of sglang is imported
    engine = sglang.Engine(model_path=..., tp_size=2, **cpu_host.engine_arguments())
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from sglang_reshard.errors import Unsupported

# The folder that holds a package named `sgl_kernel`: the folder goes on the path, not the package.
STAND_IN = Path(__file__).parent / "stand_in"


class GpuHost(Unsupported):
    """This host has a usable GPU, on which SGLang runs without cpu_host."""


def refuse_gpu(what: str, instead: str) -> None:
    """Raises GpuHost if torch sees a GPU. `what` was used, and `instead` is what to do."""
    import torch

    if torch.cuda.is_available():
        raise GpuHost(
            f"{what} is for hosts without a GPU, but this host has {torch.cuda.get_device_name(0)}. {instead}"
        )


def environment(tp_size: int, groups: int = 1) -> dict[str, str]:
    """Returns the environment variables that a CPU engine needs, including PYTHONPATH.

    groups  of `tp_size` ranks each: data parallel ranks without dp-attention, times pipeline stages
    """
    if tp_size < 1:
        raise ValueError(f"tp_size must be at least 1, not {tp_size}")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(_bound_ranks(tp_size, groups)))
    path = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(STAND_IN)]
    return {
        "PYTHONPATH": os.pathsep.join([str(STAND_IN), *path]),
        "SGLANG_USE_CPU_ENGINE": "1",
        # A library that does not exist: SGLang then uses gloo instead of NCCL.
        "SGLANG_NCCL_SO_PATH": "none",
        # An entry per rank; otherwise SGLang requires as many NUMA nodes as ranks.
        "SGLANG_CPU_OMP_THREADS_BIND": binding,
        # Otherwise the first request compiles for 20 s and more.
        "TORCHDYNAMO_DISABLE": "1",
        # From 0.5.19 the compiled prefix tree needs exactly the torch version that the wheel requires. The Python one
        # does not, so that a newer SGLang runs in the environment of an older one.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        # Otherwise each rank starts a thread per core.
        "OMP_NUM_THREADS": str(max(1, len(cores) // (groups * tp_size))),
    }


def _bound_ranks(tp_size: int, groups: int) -> int:
    """Returns how many ranks SGLang wants to bind to cores: those of one group, or, where bootstrap.py does so, all."""
    sglang = importlib.util.find_spec("sglang")
    folders = sglang.submodule_search_locations or () if sglang is not None else ()
    of_all = any(Path(folder, "srt/distributed/bootstrap.py").exists() for folder in folders)
    return groups * tp_size if of_all else tp_size


def activate(tp_size: int, groups: int = 1) -> None:
    """Applies `environment` to this process; the processes it starts inherit it. Idempotent."""
    refuse_gpu("cpu_host", "Start the engine without it, or set CUDA_VISIBLE_DEVICES='' to try the CPU path here.")
    loaded = sys.modules.get("sgl_kernel")
    if loaded is not None and not str(loaded.__file__).startswith(str(STAND_IN)):
        raise Unsupported(
            f"sgl_kernel is already imported from {loaded.__file__}. Call cpu_host.activate() before the first import "
            "of sglang."
        )
    os.environ.update(environment(tp_size, groups))
    sys.path[:] = [str(STAND_IN), *(p for p in sys.path if p != str(STAND_IN))]


def engine_arguments(**overrides: Any) -> dict[str, Any]:
    """Returns keyword arguments for `sglang.Engine` or `VerlEngine` on a CPU host, updated with `overrides`."""
    arguments: dict[str, Any] = {
        "device": "cpu",
        # The default on an x86 CPU is intel_amx, which only SGLang's AMX build has.
        "attention_backend": "torch_native",
        # Size of the KV cache in tokens. Without it each rank allocates its fraction of the whole host.
        "max_total_tokens": 2048,
        # A limit that max_total_tokens stays far below. It is high because the ranks load at the same time: with a low
        # one, the memory that the other ranks allocate meanwhile looks like too large a model.
        "mem_fraction_static": 0.9,
        # Without it idle ranks poll all the time, and keep the cores from the trainer and from each other.
        "sleep_on_idle": True,
        # GPU features. Without these lines 0.5.12 starts, too, but tries them first and warns.
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "disable_custom_all_reduce": True,
    }
    return arguments | overrides


def leave_reductions_alone() -> None:
    """Keeps SGLang from patching torch's reductions in this process.

    Before it sends tensors, SGLang replaces the device's index by its UUID in their pickled form, and finds no index in
    a CPU tensor: "IndexError: tuple index out of range". It does not if these two names are set, which mean that the
    patch has been applied.
    """
    from torch.multiprocessing import reductions

    vars(reductions).setdefault("_reduce_tensor_original", reductions.reduce_tensor)
    vars(reductions).setdefault("_rebuild_cuda_tensor_original", reductions.rebuild_cuda_tensor)


def command_line() -> list[str]:
    """Returns `engine_arguments` as options of `sglang serve` and `python -m sglang.launch_server`."""
    options = []
    for name, value in engine_arguments().items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return options
