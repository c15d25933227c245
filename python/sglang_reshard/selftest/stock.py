"""SGLang's own ways to new weights, of a live engine."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path
from typing import Any

import torch

from sglang_reshard.errors import EngineRefused
from sglang_reshard.testing import cpu_host


def load(engine: Any, checkpoint: Path) -> None:
    """Lets the engine load a checkpoint. Raises EngineRefused."""
    _check(engine.update_weights_from_disk(str(checkpoint), load_format="auto"))


def update(engine: Any, whole: list[tuple[str, torch.Tensor]]) -> None:
    """Gives the engine whole tensors. Raises EngineRefused."""
    _check(engine.update_weights_from_tensor(whole))


def _check(answer: Any) -> None:
    done, *why = answer
    if not done:
        raise EngineRefused(f"SGLang's own update was refused: {why}")


def prepare() -> None:
    """Must be called on a trainer rank without a GPU before the engine starts, as its processes inherit this.

    Two things keep SGLang's path, which is made for GPUs, from working with tensors in host memory. Handing them over
    by name, the other way there is, takes twice as long as by descriptor.
    """
    if torch.cuda.is_available():
        return
    cpu_host.leave_reductions_alone()
    # Descriptors are handed over to who has the key; by default those are a process and its children.
    multiprocessing.current_process().authkey = b"one key for all trainer ranks"
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each tensor is one
