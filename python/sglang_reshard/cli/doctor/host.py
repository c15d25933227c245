"""Checks the host: shared memory, file descriptors, memory mappings, environment variables, NIXL over RDMA."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from sglang_reshard.cli.doctor.finding import Finding, fail, ok, warning
from sglang_reshard.cli.versions import installed_version
from sglang_reshard.observability.logs import log_format
from sglang_reshard.patches.launch import TORCHRUN_VARIABLES

SHARED_MEMORY = Path("/dev/shm")
MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
RDMA_DEVICES = Path("/sys/class/infiniband")
_UCX_SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES")
_MIB = 1 << 20
_ENGINE_BYTES = 64 * _MIB  # an engine's own segment has 25 MB, and NCCL has some for each rank
_ROOMY_BYTES = 1024 * _MIB
_FEW_DESCRIPTORS, _ENOUGH_DESCRIPTORS = 1024, 16384
_ENOUGH_MAPPINGS = 65530  # Linux's own


def check_shared_memory() -> list[Finding]:
    cure = "enlarge it: docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=16g /dev/shm"
    if not SHARED_MEMORY.is_dir():
        return fail(
            "shared memory", f"{SHARED_MEMORY} does not exist", "mount a tmpfs there, or run the container with one"
        )
    if not os.access(SHARED_MEMORY, os.W_OK):
        return fail("shared memory", f"{SHARED_MEMORY} cannot be written to", f"chmod 1777 {SHARED_MEMORY}")
    usage = shutil.disk_usage(SHARED_MEMORY)
    says = f"{usage.free / _MIB:,.0f} of {usage.total / _MIB:,.0f} MiB of {SHARED_MEMORY} are free"
    if usage.free < _ENGINE_BYTES:
        return fail("shared memory", f"{says}; an engine needs {_ENGINE_BYTES // _MIB} MiB", cure)
    if usage.free < _ROOMY_BYTES:
        return warning("shared memory", f"{says}; a trainer on CPU moves its shards into it", cure)
    return ok("shared memory", says)


def check_descriptors() -> list[Finding]:
    """A trainer rank on CPU keeps one open per storage; it raises its soft limit itself, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{_limit(soft)} open files, {_limit(hard)} at most"
    cure = "ulimit -n 65536 (docker: --ulimit nofile=65536)"
    if 0 <= hard < _FEW_DESCRIPTORS:
        return fail("descriptors", says, cure)
    if 0 <= hard < _ENOUGH_DESCRIPTORS:
        return warning("descriptors", f"{says}; one is needed for each storage of a trainer rank on CPU", cure)
    return ok("descriptors", says)


def check_mappings() -> list[Finding]:
    """An engine rank maps each storage of each trainer rank on its host."""
    try:
        most = int(MAX_MAP_COUNT.read_text())
    except (OSError, ValueError):
        return []
    says = f"vm.max_map_count is {most:,}"
    if most < _ENOUGH_MAPPINGS:
        cure = "sysctl -w vm.max_map_count=262144"
        return warning("mappings", f"{says}; an engine rank on CPU maps every storage of every trainer rank", cure)
    return ok("mappings", says)


def check_torchrun_variables() -> list[Finding]:
    found = [name for name in TORCHRUN_VARIABLES if name in os.environ]
    if not found:
        return ok("environment", "none of torchrun's variables")
    return warning(
        "environment",
        f"torchrun's {', '.join(found)}: an engine that is started here waits for a rendezvous that never comes",
        "start it by VerlEngine, which takes them away, or by: env " + " ".join(f"-u {name}" for name in found),
    )


def check_log_format() -> list[Finding]:
    try:
        log_format()
    except ValueError as error:
        return fail("log format", str(error), "set it to json, or unset it")
    return []


def check_nixl() -> list[Finding]:
    version = installed_version("nixl")
    if version is None:
        return ok("nixl", "not installed; only transport='nixl' needs it")
    settings = [f"{name}={os.environ[name]}" for name in _UCX_SETTINGS if name in os.environ]
    devices = sorted(device.name for device in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    says = ", ".join([version, *settings])
    if devices:
        return ok("nixl", f"{says}; RDMA devices: {', '.join(devices)}")
    return warning(
        "nixl",
        f"{says}; this host has no RDMA device, so memory on other hosts is read over TCP",
        "in a container, pass the devices through: docker run --device /dev/infiniband; else use transport='auto'",
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
