"""sglang.srt.entrypoints.engine: `Engine.update_weights_distributed`, and a check that it will work."""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import TYPE_CHECKING, Any

import psutil

from sglang_reshard.errors import EngineDied, Unsupported
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import presence
from sglang_reshard.patches.fitness import unfit, warn_if_unfit
from sglang_reshard.patches.outlive import Children, ended, outlive
from sglang_reshard.patches.shared_segments import forget, is_an_engines, remove, segments_of
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq

__all__ = ["apply", "check_installed", "end", "outlive", "update_weights_distributed"]

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

logger = get_logger(__name__)

_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_ANSWER_S = 60.0
_END_S = 60.0  # a killed process may need a while to give back a GPU's memory


def apply() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    Engine.update_weights_distributed = update_weights_distributed
    # Every start comes by one of them: Ray's by the second only, the Rust server's by the first only.
    for start in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
        HookRegistry.register(f"{_ENGINE}.{start}", _look_at_arguments, HookType.BEFORE)


def _look_at_arguments(_engine: type[Engine], *arguments: Any, **named: Any) -> None:
    try:
        warn_if_unfit(named["server_args"] if "server_args" in named else arguments[0])
    except Exception:  # a newer SGLang that names things otherwise must start all the same
        logger.warning("Whether this engine can be updated will be known at its first update", exc_info=True)


def update_weights_distributed(self: Engine, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
    """Reshards a trainer's weights into the live parameters; `WeightSender` is the other side."""
    if self.loop.is_running():
        message = "another thread is using this Engine; give it one call at a time"
        return DistributedUpdateWeightsOutput(success=False, message=message)
    try:
        return self.loop.run_until_complete(self.tokenizer_manager.update_weights_distributed(request))
    except EngineDied as error:
        return DistributedUpdateWeightsOutput(success=False, message=str(error))


def end(engine: Engine) -> None:
    """End an engine's processes and what they leave in shared memory, also where some have died before.

    SGLang's own `Engine.shutdown` kills every child of this process, a trainer's data loaders and Python's
    resource tracker among them, and leaves the shared memory.
    """
    manager = engine.tokenizer_manager
    if manager is not None and manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()  # it would take their end for a crash
    children = Children.of(engine)
    family = []
    for child in children.members:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += [child.process, *child.process.children(recursive=True)]
    segments = children.segments | segments_of(p.pid for p in family)
    segments -= {segment for segment in segments_of([os.getpid()]) if not is_an_engines(segment)}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=_END_S)
    present = [segment for segment in segments if segment.exists()]
    remove(present)
    forget(present)
    atexit.unregister(engine.shutdown)
    ended(engine)


def check_installed(engine: Engine) -> None:
    """Raise Unsupported unless this engine can be updated, and carries these patches in this version throughout.

    Raises DeadlineExceeded where its schedulers do not answer.
    """
    if not hasattr(engine, "update_weights_distributed"):
        raise Unsupported(
            "SGLang did not load the sglang-reshard plugin: look for 'Failed to load plugin reshard' in its log, "
            "and see that SGLANG_PLUGINS, if it is set, names 'reshard'"
        )
    if reason := unfit(engine.server_args):
        raise Unsupported(reason)
    engine.loop.run_until_complete(presence.check(engine.tokenizer_manager, _ANSWER_S))
