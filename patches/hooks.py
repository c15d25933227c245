"""Registers the hooks of this package in SGLang's own registry. See docs/hooks.md for the reason of each.

A hook before a target gets its arguments, one after it the result, too, and one around it the target itself.

Checks that they are applied, in this process and in the schedulers. SGLang only logs a plugin's failures: a hook whose
target has been renamed is silently missing. And a process that loads no plugins ends with an error on the first message
of an unknown type. So all processes are asked before the first update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import DeadlineExceeded, Unsupported
from sglang_reshard.patches.attached import attached
from sglang_reshard.version import VERSION_KEY, __version__

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_Hooks = list[tuple[str, Callable[..., Any]]]  # target in sglang.srt, hook


def register() -> None:
    """Registers all of them: SGLang applies hooks once all plugins are loaded."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_reshard.patches import (
        cache_versions,
        disk_loads,
        engine,
        engine_start,
        http_server,
        metrics,
        model_runner,
        repacking,
        request_gate,
        scheduler,
        sglang_versions,
        token_versions,
        weights_info,
    )

    manager = "managers.tokenizer_manager.TokenizerManager"
    mixin = "managers.tokenizer_control_mixin.TokenizerControlMixin"
    memory_saver_adapter = "utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal"
    before: _Hooks = [
        # Every start of an engine calls one of these: Ray's only the second, the Rust server's only the first.
        ("entrypoints.engine.Engine._launch_scheduler_processes", engine.check_arguments),
        ("entrypoints.engine.Engine._launch_detokenizer_subprocesses", engine.check_arguments),
        (f"{manager}._init_req_state", request_gate.refuse_on_arrival),
        (f"{manager}._validate_and_resolve_lora", request_gate.refuse_registered),
        (f"{manager}._send_one_request", request_gate.refuse_registered),
        (f"{manager}._send_batch_request", request_gate.refuse_registered),
        ("managers.schedule_batch.Req.init_next_round_input", cache_versions.mark),
        (f"{memory_saver_adapter}.pause", model_runner.before_pause),
    ]
    after: _Hooks = [
        ("model_loader.loader._initialize_model", repacking.remember),
        ("model_executor.model_runner.ModelRunner.load_model", model_runner.remember),
        ("managers.scheduler.Scheduler.init_request_dispatcher", scheduler.dispatch),
        ("managers.scheduler.Scheduler.get_internal_state", scheduler.report_version),
        # By then SGLang has set up its own metrics. A hook on the server's module would import it, and FastAPI with it,
        # in every scheduler; a process that may be a server has a tokenizer manager.
        (f"{mixin}.init_communicators", metrics.initialize),
        (f"{mixin}.init_communicators", http_server.extend),
        (f"{mixin}._update_weight_version_if_provided", metrics.set_version),  # by any update, SGLang's own too
    ]
    around: _Hooks = [
        ("model_loader.loader.initialize_dummy_weights", engine_start.randomize),
        ("model_loader.loader.DefaultModelLoader.load_weights_and_postprocess", disk_loads.note_load),
        (f"{manager}._wait_for_model_update_from_disk", disk_loads.update_from_disk),
        (f"{manager}.continue_generation", request_gate.continue_generation),
        # The methods by which SGLang itself changes weights.
        (f"{manager}.update_weights_from_disk", weights_info.around_load),
        (f"{manager}.update_weights_from_distributed", weights_info.around_update),
        (f"{manager}.update_weights_from_tensor", weights_info.around_update),
        (f"{manager}.update_weights_from_ipc", weights_info.around_update),
        (f"{manager}.release_memory_occupation", weights_info.around_release),
    ]
    if sglang_versions.reports_token_versions(Scheduler):
        around.append(("managers.scheduler.Scheduler.record_weight_version_change", token_versions.around_record))
    else:
        after += [
            ("managers.scheduler.Scheduler.init_request_dispatcher", token_versions.begin),
            ("managers.schedule_batch.Req.__init__", token_versions.watch),
            (f"{mixin}.init_communicators", token_versions.extend),
        ]
    if hasattr(TokenizerManager, "begin_weight_update"):  # from 0.5.21; it writes nothing itself
        around.append((f"{manager}.begin_weight_update", weights_info.around_write))
    for kind, hooks in ((HookType.BEFORE, before), (HookType.AFTER, after), (HookType.AROUND, around)):
        for target, hook in hooks:
            HookRegistry.register(f"sglang.srt.{target}", hook, kind)


@dataclass
class Checked:
    """Notes that all schedulers of a tokenizer manager have these patches."""

    schedulers: bool = False


def missing_hooks() -> list[str]:
    """Returns the targets in SGLang whose hooks of this package are registered but not applied in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(
        target
        for target, found in HookRegistry._hooks.items()
        if target not in HookRegistry._patched
        and any(hook.__module__.startswith(f"{__package__}.") for _, hook, *_ in found)
    )


def installed_version() -> str:
    """Returns this package's version, and the hooks that are missing in this process, if any."""
    missing = missing_hooks()
    return f"{__version__} without {', '.join(missing)}" if missing else __version__


def mismatch(states: list[dict[str, Any]]) -> str:
    """Returns which processes lack these patches; empty if none does.

    states  `get_internal_state` of every scheduler that answers
    """
    found = {
        "the tokenizer manager": installed_version(),
        **{f"scheduler {n}": state.get(VERSION_KEY) for n, state in enumerate(states)},
    }
    if wrong := {process: version for process, version in found.items() if version != __version__}:
        names: dict[Any, str] = {None: "no sglang-reshard"}
        return (
            "; ".join(f"{process} has {names.get(v, f'sglang-reshard {v}')}" for process, v in wrong.items())
            + f", where {__version__} is needed: install the same version on every node of the engine, and search its "
            "log for 'Failed to load plugin' and 'Failed to apply hooks'"
        )
    return ""


async def check(manager: TokenizerManager, timeout_s: float) -> None:
    """Raises Unsupported unless all of the engine's processes have these patches. Asks again until they do.

    Raises DeadlineExceeded if the schedulers do not answer.
    """
    checked = attached(manager, Checked)
    if checked.schedulers:
        return
    # Not cancelled: a late answer belongs to this request, and SGLang would take it for the next one's.
    answer = asyncio.ensure_future(manager.get_internal_state())
    done, _ = await asyncio.wait([answer], timeout=timeout_s)
    if not done:
        raise DeadlineExceeded(
            f"the engine's schedulers did not report their version of sglang-reshard within {timeout_s:.0f} s; look at "
            "the engine's log"
        )
    if reason := mismatch(answer.result()):
        raise Unsupported(reason)
    checked.schedulers = True
