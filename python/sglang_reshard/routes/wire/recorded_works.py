"""Keeps works of NCCL groups as long as torch's flight recorder refers to their events.

The recorder is the process's own, and on by default. Each of its entries borrows the events of a work
(`FlightRecorder::record`). Only a watchdog has them returned (`Watchdog::runLoop`, `retire_id`), and our groups have
none: a later dump of the trainer's (`dump_entries`) would read events that are freed. An entry is overwritten after as
many others as the recorder has, so as many works are kept.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Mapping

_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first that is set
_DEFAULT = 2000


def recorder_entries(environment: Mapping[str, str]) -> int:
    """Returns the number of entries that the recorder has, 0 if it is off."""
    for name in _VARIABLES:
        if (value := environment.get(name)) is not None:
            return max(0, int(value)) if value.lstrip("-").isdigit() else _DEFAULT
    return _DEFAULT


RECORDED_WORKS: deque[object] = deque(maxlen=recorder_entries(os.environ))
atexit.register(RECORDED_WORKS.clear)  # events are freed while CUDA is still there
