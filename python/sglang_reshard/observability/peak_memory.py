"""How much memory an update takes beyond what was there before, as the system sees it."""

from __future__ import annotations

import torch


class PeakMemory:
    """Measures from its making to `extra_bytes()`.

    On CPU: the high-water mark of resident memory, less what was resident before and less shared and
    file pages mapped meanwhile (a trainer rank's memory, libraries' code). It sees the whole process, so
    what Python and torch allocate on a first use belongs to it. On GPU: the caching allocator's peak.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        reset = _reset_high_water_mark()
        status = _status()
        # Where the mark cannot be reset, only what rises above the old one is seen: a lower bound.
        self._before, self._mapped = status["VmRSS" if reset else "VmHWM"], _mapped(status)

    def extra_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        status = _status()
        mapped = max(0, _mapped(status) - self._mapped)
        return max(0, status["VmHWM"] - self._before - mapped)


def _reset_high_water_mark() -> bool:
    """Set it back to what is resident now; False where the system does not let us."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        return False
    return True


def _mapped(status: dict[str, int]) -> int:
    return status["RssShmem"] + status["RssFile"]


def _status() -> dict[str, int]:
    """Bytes by field of /proc/self/status."""
    wanted = ("VmRSS", "VmHWM", "RssShmem", "RssFile")
    with open("/proc/self/status") as f:
        fields = (line.split() for line in f if line.startswith(wanted))
        return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}
