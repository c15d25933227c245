"""Measures the peak memory of an update in addition to the memory its process had before."""

from __future__ import annotations

import re

import torch

from sglang_reshard.gpu.runtime import runtime

_FIELD = re.compile(rb"^(VmRSS|VmHWM|RssShmem|RssFile):\s+(\d+) kB$", re.MULTILINE)


class PeakMemory:
    """Measures from construction on.

    On CPU: the high-water mark of resident memory, less what was resident before and less shared and file pages mapped
    since (a trainer rank's memory, libraries' code). It covers the whole process, including what Python and torch
    allocate on first use. On GPU: the peak of torch's allocator, which does not know of memory that CUDA and NCCL take
    for themselves; `foreign_bytes` bounds that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._foreign = device, 0
        if runtime().is_gpu(device):
            self._before, self._foreign = runtime().start_peak(device), runtime().foreign_bytes(device)
            return
        reset = _reset_high_water_mark()
        status = _status()
        # If the mark cannot be reset, only what rises above the old one is measured: a lower bound.
        self._before, self._mapped = status["VmRSS" if reset else "VmHWM"], _mapped_bytes(status)

    def extra_bytes(self) -> int:
        """Returns the peak."""
        if runtime().is_gpu(self._device):
            return runtime().peak_bytes(self._device) - self._before
        status = _status()
        mapped = max(0, _mapped_bytes(status) - self._mapped)
        return max(0, status["VmHWM"] - self._before - mapped)

    def foreign_bytes(self) -> int:
        """Returns by how much the memory of the GPU that is not torch's in this process has grown; 0 on CPU.

        An upper bound for this process's contexts and communicators, because other processes of the GPU count, too.
        """
        if not runtime().is_gpu(self._device):
            return 0
        return max(0, runtime().foreign_bytes(self._device) - self._foreign)


def _reset_high_water_mark() -> bool:
    """Resets the mark to the resident memory. Returns False if the system does not allow it."""
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
    with open("/proc/self/status", "rb") as f:
        return {name.decode(): int(kilobytes) * 1024 for name, kilobytes in _FIELD.findall(f.read())}
