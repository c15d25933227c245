"""The layer between a route and live memory: where weights arrive, and their processing before they are live.

base        the interface; the base class is live memory itself
choice      the landings that an update needs
shadow      memory in addition to the live weights, where a staged update arrives
converting  quantizes or repacks complete weights
checked     compares the arrived weights with the trainer's, before they count
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_reshard.errors import ReshardError
    from sglang_reshard.landings.checked.source import TrainerChecks as TrainerChecks
    from sglang_reshard.protocol.session import Session


def trainer_checks(session: Session, trainer_rank: int, size: int, timeout_s: float) -> TrainerChecks:
    """Returns what answers `checked` on trainer rank `trainer_rank` of `size`. Its module is imported now."""
    from sglang_reshard.landings.checked import source

    return source.TrainerChecks(session, trainer_rank, size, timeout_s)


def explained(errors: Mapping[int, ReshardError], *of_trainer: Any) -> dict[int, ReshardError]:
    """See `checked.disagreement.explained`, which is imported now."""
    from sglang_reshard.landings.checked import disagreement

    return disagreement.explained(errors, *of_trainer)
