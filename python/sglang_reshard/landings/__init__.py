"""The layer between a route and live memory: where weights arrive, and their processing before they are live.

base        the interface; the base class is live memory itself
choice      the landings that an update needs
shadow      memory in addition to the live weights, where a staged update arrives
converting  quantizes or repacks complete weights
checked     compares the arrived weights with the trainer's, before they count
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from sglang_reshard.errors import Mismatch, ReshardError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_reshard.landings.base import Responder
    from sglang_reshard.protocol.session import Session

# Name of a landing that asks trainer ranks -> the module with the responder of trainer ranks.
_RESPONDERS = {"checked": "sglang_reshard.landings.checked.trainer"}


def responder(landing: str, session: Session, trainer_rank: int, size: int, timeout_s: float) -> Responder:
    """Returns the responder of trainer rank `trainer_rank` of `size` to a landing, whose module is imported now.

    Raises Mismatch for a landing that asks nothing.
    """
    if landing not in _RESPONDERS:
        raise Mismatch(
            f"an engine sent a request for the landing {landing!r}, which trainer ranks do not have. Run the same "
            "version of sglang-reshard on both sides"
        )
    return cast("Responder", import_module(_RESPONDERS[landing]).responder(session, trainer_rank, size, timeout_s))


def explained(errors: Mapping[int, ReshardError], *of_trainer: Any) -> dict[int, ReshardError]:
    """See `checked.disagreement.explained`, which is imported now."""
    found = import_module("sglang_reshard.landings.checked.disagreement").explained(errors, *of_trainer)
    return cast("dict[int, ReshardError]", found)
