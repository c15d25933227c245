"""Checks what reads by NIXL would go over: the package, RDMA devices, UCX's settings."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_reshard.cli.doctor.finding import Check, Finding, ok, warning
from sglang_reshard.cli.versions import installed_version

RDMA_DEVICES = Path("/sys/class/infiniband")
_SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES")


def check_nixl() -> list[Finding]:
    version = installed_version("nixl")
    if version is None:
        return ok("nixl", "not installed; only transport='nixl' needs it")
    settings = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    devices = sorted(device.name for device in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    says = ", ".join([version, *settings])
    if devices:
        return ok("nixl", f"{says}; RDMA devices: {', '.join(devices)}")
    return warning(
        "nixl",
        f"{says}; this host has no RDMA device, so memory on other hosts is read over TCP",
        "in a container, pass the devices through: docker run --device /dev/infiniband; else use transport='auto'",
    )


CHECKS: tuple[Check, ...] = (check_nixl,)
