"""Numbers what a trainer gives to engines, directly or by a snapshot, so that the order of two of them is known.

A publication is in microseconds of trainer rank 0's clock, and greater than all that its process has numbered before,
even where the clock goes back. A snapshot's is also greater than those of the snapshots before it in its folder. An
engine remembers the publication that it holds, and `WeightsInfo` tells it. 0 stands for none.
"""

from __future__ import annotations

import threading
import time

MOST_PUBLICATION = 1 << 53  # the year 2255, and what every reader of JSON takes
_lock = threading.Lock()
_last = 0


def next_publication(after: int = 0) -> int:
    """Returns a number that is greater than all before, and than `after`."""
    global _last
    with _lock:
        _last = max(time.time_ns() // 1000, _last + 1, after + 1)
        return _last
