"""Measures the peak memory that an update takes beyond what its process had before."""

from __future__ import annotations

import torch


class PeakMemory:
    """Measures from construction to `extra_bytes()`.

    On CPU: the high-water mark of resident memory, less what was resident before and less shared and file pages mapped
    since (a trainer rank's memory, libraries' code). It covers the whole process, including what Python and torch
    allocate on first use. On GPU: the caching allocator's peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        reset = _reset_high_water_mark()
        status = _status()
        # If the mark cannot be reset, only what rises above the old one is measured: a lower bound.
        self._before, self._mapped = status["VmRSS" if reset else "VmHWM"], _mapped_bytes(status)

    def extra_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        status = _status()
        mapped = max(0, _mapped_bytes(status) - self._mapped)
        return max(0, status["VmHWM"] - self._before - mapped)


def _reset_high_water_mark() -> bool:
    """Resets the mark to what is resident now. Returns False if the system does not allow it."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        return False
    return True


def _mapped_bytes(status: dict[str, int]) -> int:
    return status["RssShmem"] + status["RssFile"]


def _status() -> dict[str, int]:
    """Returns bytes by field of /proc/self/status."""
    names = ("VmRSS", "VmHWM", "RssShmem", "RssFile")
    with open("/proc/self/status") as f:
        fields = (line.split() for line in f if line.startswith(names))
        return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}
