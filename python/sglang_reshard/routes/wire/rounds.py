"""The loop over rounds that routes with buckets share: while one bucket is in transit, another is filled or emptied.

Of the rounds, at most BUCKETS are in transit. Before one more is started, the oldest has ended, and its bucket has been
emptied: so two buckets in turn are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

BUCKETS = 2
Wait = Callable[[], object]  # returns when a round has ended


def run_rounds(
    count: int,
    start: Callable[[int], Wait],
    ended: Callable[[int], object] = lambda _: None,
    underway: Callable[[], object] = lambda: None,
) -> None:
    """Starts rounds 0 to `count` - 1, and returns when all have ended.

    start     fills a round's bucket and starts its transit, or frees a bucket for arrivals; what it returns waits for
              the end
    ended     empties its bucket; rounds end in ascending order
    underway  is called once, while the first rounds are in transit
    """
    pending: deque[Wait] = deque()
    for number in range(min(BUCKETS, count)):
        pending.append(start(number))
    underway()
    for number in range(count):
        pending.popleft()()
        ended(number)
        if number + BUCKETS < count:
            pending.append(start(number + BUCKETS))
