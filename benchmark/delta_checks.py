"""What it costs to check an index of a delta, beside applying it: `python -m benchmark.delta_checks`.

One message of bfloat16, in host memory, on one thread; checked and applied in turns.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch

from benchmark import pages
from benchmark.results import Row
from benchmark.world import timed
from sglang_reshard.routes.delta.checks import is_sound, verdicts
from sglang_reshard.routes.delta.encoding import apply, encode, index_room

MIB, REPEATS = 32, 15
SHARES = (0.001, 0.01, 0.05, 0.2)


def measure(share: float) -> Row:
    """index_bytes is what is checked; seconds are medians."""
    generator = np.random.default_rng(0)
    units = MIB * (1 << 20) // 2
    base = torch.from_numpy(generator.integers(0, 1 << 15, units, np.int16))
    new, where = base.clone(), torch.from_numpy(generator.choice(units, int(units * share), replace=False))
    new[where] ^= 1
    old, latest = base.view(torch.uint8), new.view(torch.uint8)
    index = torch.empty(index_room(units), dtype=torch.uint8)
    values = torch.empty(len(latest) + 8, dtype=torch.uint8)
    encoded = encode(latest, old, 2, index, values)
    assert encoded is not None
    index = index[: encoded.index_bytes(units)]
    copy, seconds = old.clone(), list[tuple[float, ...]]()
    for _ in range(REPEATS):
        check = timed(lambda: verdicts([is_sound(encoded, units, index)]))
        seconds.append((check, timed(lambda: apply(encoded, index, values, 2, copy)), timed(lambda: copy.copy_(old))))
    check, applied, copied = (statistics.median(column) for column in zip(*seconds, strict=True))
    return {
        "mib": MIB,
        "changed_share": share,
        "kind": encoded.kind.name,
        "index_bytes": len(index),
        "check_seconds": check,
        "apply_seconds": applied,
        "copy_seconds": copied,
    }


def main() -> None:
    torch.set_num_threads(1)
    pages.publish("delta-checks", "python -m benchmark.delta_checks", [measure(share) for share in SHARES])


if __name__ == "__main__":
    main()
