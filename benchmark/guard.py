"""Says which ratios of a run are worse than those of an earlier one by more than either run's own noise.

What is compared is the time of an update over that of a copy of its bytes in the same run, so that a slower host is no
change. Noise is by how much the 95th percentile of a path's updates is above their median, in both runs together.
"""

from __future__ import annotations

from benchmark.results import Rows

_RATIO = "times_limit"


def worse(old: Rows, new: Rows) -> list[str]:
    """Returns a line for each case and path that is in both and got worse. Rows are those of bench-quick.json."""
    known = {(row["case"], row["path"]): row for row in old}
    found = []
    for row in new:
        before = known.get((row["case"], row["path"]))
        if before is None or not before[_RATIO]:
            continue
        noise = _noise(before) + _noise(row)
        if row[_RATIO] > before[_RATIO] * (1 + noise):
            found.append(
                f"{row['case']}, {row['path']}: {row[_RATIO]:.2f} times the copy, {before[_RATIO]:.2f} before; noise "
                f"{noise:.0%}"
            )
    return found


def _noise(row: dict[str, float]) -> float:
    return max(0.0, row["seconds_p95"] / row["seconds_median"] - 1)
