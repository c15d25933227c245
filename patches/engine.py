"""sglang.srt.entrypoints.engine: adds methods to `Engine`, checks and ends embedded engines.

Engine.update_weights_distributed(request)
Engine.weights_info()
Engine.record_probe(summary)
"""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from sglang_reshard.errors import EngineDied, Unsupported
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.patches import hooks, metrics, weights_info
from sglang_reshard.patches.embedded_engine_guard import EngineProcesses, death, unwatch
from sglang_reshard.patches.shared_segments import is_engine_only, remove, segments_of, unregister
from sglang_reshard.patches.supported_engine import unsupported_reason, warn_if_unsupported
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.protocol.weights_info import WeightsInfo

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

logger = get_logger(__name__)

_ANSWER_S = 60.0
_END_S = 60.0  # a killed process may need a while to free a GPU's memory


def apply() -> None:
    from sglang.srt.entrypoints.engine import Engine

    Engine.update_weights_distributed = update_weights_distributed
    Engine.weights_info = current_weights
    Engine.record_probe = record_probe


def check_arguments(_engine: type[Engine], *arguments: Any, **named: Any) -> None:
    try:
        warn_if_unsupported(named["server_args"] if "server_args" in named else arguments[0])
    except Exception:  # a newer SGLang with other names must start all the same
        logger.warning(
            "This engine's support for updates could not be checked; its first update will show it", exc_info=True
        )


def update_weights_distributed(self: Engine, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
    """Updates the live parameters to a trainer's weights. Called by `WeightSender`."""
    if self.loop.is_running():
        message = "another thread is using this Engine; make one call at a time"
        return DistributedUpdateWeightsOutput(success=False, message=message)
    try:
        output = self.loop.run_until_complete(self.tokenizer_manager.update_weights_distributed(request))
    except EngineDied as error:
        return DistributedUpdateWeightsOutput(success=False, message=str(error))
    if not output.success and (died := death(self)):  # the cause of whatever the update was refused for
        return msgspec.structs.replace(output, message=died)
    return output


def current_weights(self: Engine) -> WeightsInfo:
    """Describes the live weights, and the update that brought them."""
    return weights_info.current(self.tokenizer_manager)


def record_probe(self: Engine, summary: ProbeSummary) -> None:
    """Adds the outcome of a probe to the engine's metrics."""
    metrics.observe_probe(self.tokenizer_manager, summary)


def end(engine: Engine) -> None:
    """Ends an engine's processes and removes their shared memory, even if some of them have died.

    SGLang's own `Engine.shutdown` kills every child of this process, including a trainer's data loaders and Python's
    resource tracker, and leaves the shared memory.
    """
    manager = engine.tokenizer_manager
    if manager is not None and manager._subprocess_watchdog is not None:
        manager._subprocess_watchdog.stop()  # it would report their end as a crash
    watched = EngineProcesses.of(engine)
    processes = []
    for member in watched.members:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes += [member.process, *member.process.children(recursive=True)]
    segments = watched.segments | segments_of(p.pid for p in processes)
    segments -= {segment for segment in segments_of([os.getpid()]) if not is_engine_only(segment)}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_END_S)
    present = [segment for segment in segments if segment.exists()]
    remove(present)
    unregister(present)
    atexit.unregister(engine.shutdown)
    unwatch(engine)


def check_installed(engine: Engine) -> None:
    """Raises Unsupported unless this engine can be updated and all its processes have this version of the patches.

    Raises DeadlineExceeded if its schedulers do not answer.
    """
    if not hasattr(engine, "update_weights_distributed"):
        raise Unsupported(
            "SGLang did not load the sglang-reshard plugin. Search its log for 'Failed to load plugin reshard', and "
            "check that SGLANG_PLUGINS, if set, includes 'reshard'"
        )
    if reason := unsupported_reason(engine.server_args):
        raise Unsupported(reason)
    engine.loop.run_until_complete(hooks.check(engine.tokenizer_manager, _ANSWER_S))
