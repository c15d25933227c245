"""Checks that these patches are applied, in this process and in the schedulers.

SGLang only logs a plugin's failures: a hook whose target has been renamed is silently missing. And a process that loads
no plugins ends with an error on the first message of an unknown type. So all processes are asked before the first
update.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import DeadlineExceeded, Unsupported
from sglang_reshard.patches.attached import attached
from sglang_reshard.version import VERSION_KEY, __version__

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


@dataclass
class Checked:
    """Notes that all schedulers of a tokenizer manager have these patches."""

    schedulers: bool = False


def missing_hooks() -> list[str]:
    """Returns the targets in SGLang whose hooks of this package are registered but not applied in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(
        target
        for target, hooks in HookRegistry._hooks.items()
        if target not in HookRegistry._patched
        and any(hook.__module__.startswith(f"{__package__}.") for _, hook, *_ in hooks)
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
