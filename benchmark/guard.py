"""Says which ratios of a run are worse than those of an earlier one by more than either run's own noise.

What is compared is the time of an update over that of a copy of its bytes in the same run, so that a slower host is no
change; another kind of host may be, as cores and memory do not differ alike, and is named. SGLang's own path is no
change of this package. Noise is by how much the 95th percentile of a path's updates is above their median, in both runs
together.
"""

from __future__ import annotations

from benchmark.cases import STOCK
from benchmark.results import Head, Rows

_RATIO = "times_limit"


def worse(old: Rows, new: Rows) -> list[str]:
    """Returns a line for each case and path that is in both and got worse. Rows are those of bench-quick.json."""
    known = {(row["case"], row["path"]): row for row in old}
    found = []
    for row in new:
        if row["path"] == STOCK:
            continue
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


def other_host(old: Head, new: Head) -> str:
    """Returns what to say of results of two hosts; nothing for results of one."""
    was, now = ((head["host"]["cpu"], head["host"]["cores"]) for head in (old, new))
    return "" if was == now else f"the earlier results are of {was[1]} cores of {was[0]}, these of {now[1]} of {now[0]}"


def _noise(row: dict[str, float]) -> float:
    return max(0.0, row["seconds_p95"] / row["seconds_median"] - 1)
