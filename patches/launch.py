"""Starts an engine's processes from inside a torchrun worker: the environment, and the script's main guard."""

from __future__ import annotations

import ast
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sglang_reshard.errors import ReshardError

# Set by torchrun for its workers. An engine rank that inherits them takes itself for a trainer rank, and silently waits
# for a rendezvous that never happens.
TORCHRUN_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip


# Read after the start, too, whenever a metric is first used; set if the engine has enable_metrics=True.
_KEPT_VARIABLES = {"PROMETHEUS_MULTIPROC_DIR"}


@contextmanager
def without_torchrun_variables() -> Iterator[None]:
    """Hides torchrun's variables from processes started inside the block, and restores the environment afterwards.

    All of it: SGLang sets variables in the process that starts an engine, for those that it spawns (NCCL_CUMEM_ENABLE,
    NCCL_NVLS_ENABLE, CUDA_DEVICE_MAX_CONNECTIONS and more). In a trainer they would stay, on one rank in several, and
    the members of a communicator that is made later would disagree on how to connect.
    """
    saved = dict(os.environ)
    for name in TORCHRUN_VARIABLES:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name in os.environ.keys() - saved.keys() - _KEPT_VARIABLES:
            del os.environ[name]
        os.environ.update(saved)


def require_main_guard() -> None:
    """Raises ReshardError if the script does not start the engine under `if __name__ == "__main__":`.

    The engine spawns its processes, and each imports the script again: without the guard each would start its own
    trainers and engines, which looks like a hang.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ReshardError(_MESSAGE)  # this is such a child, importing the script
    frame = _main_module_frame()
    if frame is None:
        return
    path = frame.f_code.co_filename
    try:
        with open(path) as f:
            tree = ast.parse(f.read())
    except (OSError, SyntaxError):
        return  # python -c, a notebook: a child imports nothing again
    for statement in tree.body:
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or statement.lineno):
            if not (isinstance(statement, ast.If) and "__main__" in ast.dump(statement.test)):
                raise ReshardError(f"{path}, line {frame.f_lineno}: {_MESSAGE}")
            return


_MESSAGE = (
    "the engine is started at the script's top level. Its processes import the script again and would start another "
    'engine. Put the script\'s code into a function and call it under `if __name__ == "__main__":`'
)


def _main_module_frame() -> FrameType | None:
    """Returns the frame of the main script's top level if the caller was called from there, else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame
        frame = frame.f_back
    return None
