"""A metric of one series, whose label changes: the one with the old label goes away.

prometheus_client removes no series where several processes share a folder, as SGLang's do, and a series for each
version of a long run would pile up. The collector reads every file of the folder, though: this series has a file of
its own, which is replaced as a whole.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def show_only(gauge: Any, help: str, labels: dict[str, str]) -> None:
    """From now on the metric is 1 with these labels, and has no other series.

    gauge  that prometheus_client has made of it; it serves itself where there is only this process
    help   what it was made with, which it does not tell
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is None:
        gauge.clear()
        gauge.labels(**labels).set(1)
        return
    from prometheus_client.mmap_dict import MmapedDict, mmap_key

    # The collector takes kind, mode and process from the name.
    file = Path(folder, f"gauge_mostrecent_reshard{os.getpid()}.db")
    new = file.with_suffix(".new")
    new.unlink(missing_ok=True)
    (family,) = gauge.describe()
    series = MmapedDict(str(new))
    series.write_value(mmap_key(family.name, family.name, list(labels), list(labels.values()), help), 1.0, time.time())
    series.close()
    new.replace(file)
