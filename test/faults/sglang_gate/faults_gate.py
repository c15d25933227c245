"""A plugin of SGLang's: holds an engine rank in the middle of `move` as long as a file is there.

The folder is in SGLANG_RESHARD_FAULTS_GATE. While it has `hold-1`, engine rank 1 makes half of its next copies, writes
its process id to `at-1`, and waits.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.005


def install() -> None:
    """Entry point; SGLang calls it in each of its processes."""
    folder = os.environ.get("SGLANG_RESHARD_FAULTS_GATE")
    if not folder:
        return
    import torch

    from sglang_reshard.copying.copy_list import CopyList
    from sglang_reshard.engine.receiver import WeightReceiver

    if hasattr(CopyList.run, "gate"):
        return
    ranks: list[int] = []  # this process's, once it has one
    stock_init, stock_run = WeightReceiver.__init__, CopyList.run

    @functools.wraps(stock_init)
    def init(self: Any, model: Any, rank: int, *rest: Any, **options: Any) -> None:
        ranks[:] = [rank]
        stock_init(self, model, rank, *rest, **options)

    @functools.wraps(stock_run)
    def run(self: Any) -> None:
        hold = Path(folder, f"hold-{ranks[0]}") if ranks else None
        if hold is not None and hold.exists():
            half = len(self._destinations) // 2
            with torch.inference_mode():
                torch._foreach_copy_(self._destinations[:half], self._sources[:half])
            written = hold.with_name(f"at-{ranks[0]}.part")
            written.write_text(str(os.getpid()))
            written.rename(hold.with_name(f"at-{ranks[0]}"))
            while hold.exists():
                time.sleep(_POLL_S)
        stock_run(self)

    run.gate = True  # type: ignore[attr-defined]
    WeightReceiver.__init__, CopyList.run = init, run  # type: ignore[method-assign]
