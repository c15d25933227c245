"""What this process takes beyond what it had, shared memory included: stock's copies are there."""

from __future__ import annotations

from pathlib import Path

import torch


class Rise:
    """Measures from its making to `bytes()`: resident memory, or on a GPU the caching allocator's peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now what is resident
            self._before = _resident("VmRSS")

    def bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _resident("VmHWM") - self._before)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
