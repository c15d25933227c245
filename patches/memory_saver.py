"""sglang.srt.utils.torch_memory_saver_adapter: drops what holds pages of the weights, before they are released.

A memory saver maps other pages at the same addresses when it resumes. Memory that is registered with NIXL then, or read
by an update, would be the old pages: weights would arrive where nobody looks. Addresses do not tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_reshard.observability.logs import get_logger
from sglang_reshard.patches import model_runner

if TYPE_CHECKING:
    from sglang_reshard.engine.receiver import WeightReceiver

logger = get_logger(__name__)
_WEIGHTS = "weights"  # the tag of SGLang's weights


def before_pause(_adapter: Any, tag: str | None = None, *_: Any, **__: Any) -> None:
    if tag not in (None, _WEIGHTS):  # None: all
        return
    for receiver in list(model_runner.receivers):
        _release_pages(receiver)


def _release_pages(receiver: WeightReceiver) -> None:
    try:
        receiver.release_pages()
    except Exception:  # it would end the scheduler
        logger.exception("registrations of the weights' memory could not be dropped before the memory is released")
