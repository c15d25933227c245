"""DeepSpeed in an environment of its own, beside the project's: `make setup-deepspeed`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / ".venv" / "deepspeed"


def import_deepspeed(rank: int) -> Any:
    """For a process of its own, in a process group: what DeepSpeed changes in torch is gone with the process."""
    sys.path.append(str(FOLDER))
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import deepspeed

    logging.disable(logging.WARNING)
    deepspeed.init_distributed("gloo")
    return deepspeed
