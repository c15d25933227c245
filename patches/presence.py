"""Whether these patches are in place, in this process and in the schedulers'.

SGLang only logs what goes wrong with a plugin: a hook whose target has been renamed is missing in silence. And a
process into which SGLang loads no plugins ends with an error on the first message that it does not know. So everybody
is asked before the first update.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import DeadlineExceeded, Unsupported
from sglang_reshard.version import VERSION_KEY, __version__

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_PRESENT = "_reshard_present"  # on the manager: the schedulers have been seen to carry these patches


def absent_hooks() -> list[str]:
    """Targets in SGLang that hooks of ours are registered for and not applied to, in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return sorted(
        target
        for target, hooks in HookRegistry._hooks.items()
        if target not in HookRegistry._patched and any(_is_ours(hook) for _, hook, *_ in hooks)
    )


def _is_ours(hook: Any) -> bool:
    return hook.__module__.startswith(f"{__package__}.")


def told() -> str:
    """What a process says of itself: the version, and what is missing of it."""
    absent = absent_hooks()
    return f"{__version__} without {', '.join(absent)}" if absent else __version__


def refusal(states: list[dict[str, Any]]) -> str:
    """Why an engine must not be updated, given what its schedulers say of themselves; empty if it may.

    states  `get_internal_state` of every scheduler that answers
    """
    everybody = {"this process": told(), **{f"scheduler {n}": s.get(VERSION_KEY) for n, s in enumerate(states)}}
    if wrong := {who: what for who, what in everybody.items() if what != __version__}:
        return (
            "; ".join(f"{who} has {_wording(what)}" for who, what in wrong.items())
            + f", where {__version__} is needed: install the same version on every node of the engine, and look in its "
            "log for 'Failed to load plugin' and 'Failed to apply hooks'"
        )
    return ""


async def check(manager: TokenizerManager, timeout_s: float) -> None:
    """Raise Unsupported unless all of the engine's processes carry these patches; they are asked until they do.

    Raises DeadlineExceeded where they do not answer.
    """
    if getattr(manager, _PRESENT, False):
        return
    # Not cancelled: an answer that comes later belongs to this question, and SGLang would take it for the next one's.
    answer = asyncio.ensure_future(manager.get_internal_state())
    done, _ = await asyncio.wait([answer], timeout=timeout_s)
    if not done:
        raise DeadlineExceeded(
            f"the engine's schedulers did not say within {timeout_s:.0f} s what they are; look at their log"
        )
    if why := refusal(answer.result()):
        raise Unsupported(why)
    setattr(manager, _PRESENT, True)


def _wording(what: str | None) -> str:
    return "no sglang-reshard" if what is None else f"sglang-reshard {what}"
