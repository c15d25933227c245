"""Checks GPUs, peer access, the kind of their memory, memory handles between processes, NCCL and the memory saver."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import torch

from sglang_reshard.cli.doctor.finding import Finding, fail, ok, warning
from sglang_reshard.cli.versions import installed_version
from sglang_reshard.errors import ReshardError
from sglang_reshard.gpu.rank_info import NCCL_SETTINGS
from sglang_reshard.gpu.runtime import rank_device, runtime
from sglang_reshard.layout.regions import LocalRegion
from sglang_reshard.memory.gpu_memory import GpuAllocation
from sglang_reshard.memory.mapping import Handles, MemoryExporter
from sglang_reshard.memory.peer_memory import PeerMemory
from sglang_reshard.protocol.messages import decode
from sglang_reshard.shown_names import some_names

_READER_S = 120.0  # it imports torch, which takes long where many do
_ELEMENTS = 1024  # of each exported shard
_DEVICES = Path("/dev")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def check_gpus() -> list[Finding]:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        kinds = ", ".join(f"{len(list(same))} x {name}" for name, same in itertools.groupby(sorted(names)))
        on_host = len(list(_DEVICES.glob("nvidia[0-9]*")))
        hidden = on_host - len(names)
        masked = f" of the host's {on_host}; memory of the others can be mapped all the same" if hidden > 0 else ""
        return ok("GPUs", f"{kinds}{masked}; torch is built for CUDA {torch.version.cuda}")
    if not list(_DEVICES.glob("nvidia[0-9]*")):
        return ok("GPUs", "no GPU: engines run on CPU here, see sglang_reshard.testing.cpu_host")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return fail(
            "GPUs", f"torch sees none with CUDA_VISIBLE_DEVICES={visible!r}", "unset it, or name GPUs that exist"
        )
    return fail(
        "GPUs",
        f"torch sees none, though the driver has some; torch is built for CUDA {torch.version.cuda}",
        "look at nvidia-smi; install a torch for the driver's CUDA, or a newer driver",
    )


def check_peer_access() -> list[Finding]:
    """Engine ranks read other GPUs' memory through peer access; trainer ranks without it send to them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return ok("peer access", "no GPU" if count == 0 else "one GPU: nothing to reach")
    without = [pair for pair in itertools.combinations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)]
    if without:
        shown = some_names([f"{a}-{b}" for a, b in without])
        return warning(
            "peer access",
            f"not between the GPUs {shown}: engine ranks on one cannot read the other's memory, so auto sends over p2p",
            "look at nvidia-smi topo -p2p r; in a virtual machine ask for GPUs with NVLink, or turn off IOMMU and ACS",
        )
    return ok("peer access", f"between all of {count} GPUs")


def check_handles() -> list[Finding]:
    """Exports a few bytes of every device by handle and reads them in another process, as transport "ipc" does."""
    found = _handed_over([torch.device("cpu")])
    if not torch.cuda.is_available():
        return found + ok("memory by handle, GPU", "no GPU")
    return found + _handed_over([torch.device("cuda", i) for i in range(torch.cuda.device_count())])


def check_allocator() -> list[Finding]:
    """Memory of other kinds than cudaMalloc's has no handles, see `gpu.runtime`."""
    if not torch.cuda.is_available():
        return ok("GPU memory", "no GPU")
    kind = rank_device(torch.device("cuda", 0)).allocator
    if kind == "native":
        return ok("GPU memory", "torch allocates by cudaMalloc: engine ranks on this host can map it")
    return warning(
        "GPU memory",
        f"torch allocates {kind}, which has no handles: a trainer with it sends over p2p, and cannot update engine "
        "ranks on its own GPUs",
        f"unset {' and '.join(_ALLOCATOR)} for the trainer's processes",
    )


def check_nccl() -> list[Finding]:
    """Checks what trainer and engine must agree on for sends between them, see `plan.topology`."""
    if not torch.cuda.is_available():
        return ok("NCCL", "no GPU: gloo carries what is sent")
    if not torch.distributed.is_nccl_available():
        return fail("NCCL", "this torch has none", "install torch from its own index, built for CUDA")
    nccl = rank_device(torch.device("cuda", 0)).nccl
    settings = [f"{name}={nccl[name]}" for name in NCCL_SETTINGS if name in nccl]
    says = f"{nccl['version']}, {', '.join(settings) or 'no settings'}"
    if "NCCL_CUMEM_ENABLE" in nccl:
        return ok("NCCL", says)
    return ok(
        "NCCL", f"{says}; where a trainer sends on its own host, export NCCL_CUMEM_ENABLE=0 for it, as SGLang does"
    )


def check_memory_saver() -> list[Finding]:
    """release_memory_occupation needs it; and it needs torch's allocator as it is by default."""
    told = installed_version("torch_memory_saver")
    if told is None:
        return ok("memory saver", "not installed: release_memory_occupation of an engine here will free nothing")
    expandable = [name for name in _ALLOCATOR if "expandable_segments:true" in os.environ.get(name, "").lower()]
    if expandable:
        return warning(
            "memory saver",
            f"{told}, and {expandable[0]} has expandable_segments, with which an engine with enable_memory_saver ends",
            f"unset {expandable[0]} for the engine's process",
        )
    return ok("memory saver", f"{told}; used where an engine is started with enable_memory_saver=True")


def _handed_over(devices: list[torch.device]) -> list[Finding]:
    kind = "CPU" if devices[0].type == "cpu" else "GPU"
    name = f"memory by handle, {kind}"
    cure = "transport='p2p' does without; " + (
        "run trainer and engine as one user in one PID namespace (docker: --pid=host or one container)"
        if kind == "CPU"
        else "run both in one container with --ipc=host"
    )
    try:
        shards = [_pattern().to(device) for device in devices]
        exporter = MemoryExporter(0)  # it has the copies of host memory if this process uses a GPU
        runtime().synchronize(devices)
        handles = exporter.export(shards)
        if handles.reason:
            return fail(name, handles.reason, cure)
        read = subprocess.run(
            [sys.executable, "-m", "sglang_reshard.cli.doctor.gpus"],
            input=msgspec.msgpack.encode(handles),
            capture_output=True,
            timeout=_READER_S,
            check=False,
        )
    except (ReshardError, RuntimeError, subprocess.TimeoutExpired) as error:
        return fail(name, f"{type(error).__name__}: {error}", cure)
    said = read.stdout.decode().strip()
    if read.returncode or said != "same":
        last = (read.stderr.decode().strip().splitlines() or [said or "no word"])[-1]
        return fail(name, f"another process could not read it: {last}", cure)
    return ok(
        name, "another process can read this one's" + (f", on all of {len(devices)} GPUs" if kind == "GPU" else "")
    )


def _pattern() -> torch.Tensor:
    """Returns the contents of each exported shard, [1024] in float32."""
    return torch.arange(_ELEMENTS, dtype=torch.float32)


def read_handles() -> None:
    """Maps exported memory as an engine rank does, in a process by itself, and prints whether the bytes are right."""
    handles = decode(sys.stdin.buffer.read(), Handles)
    on_gpu = any(isinstance(handle, GpuAllocation) for handle in handles.storages)
    memory = PeerMemory(0, handles, torch.device("cuda" if on_gpu else "cpu", 0))
    whole = LocalRegion.whole((_ELEMENTS,))
    shards = [memory.region(i, whole, torch.float32) for i in range(len(handles.shards))]
    print("same" if all(torch.equal(shard.cpu(), _pattern()) for shard in shards) else "other bytes")


if __name__ == "__main__":
    read_handles()
