"""Tells engine ranks when SGLang itself has loaded or released all weights, which they do not see.

    stock_weights.loaded(manager)      # from disk
    stock_weights.released(manager)    # by release_memory_occupation
    request = stock_weights.told(manager, request)

An update that leaves parameters as they are (`frozen=`, `only=`) is refused where nothing has brought them, see
`engine.sound_weights`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_CHANGES = "_reshard_stock_changes"  # on the manager: how often, and whether the last time weights were loaded


def loaded(manager: TokenizerManager) -> None:
    _change(manager, True)


def released(manager: TokenizerManager) -> None:
    """Notes that weights were released: their values are lost, unless SGLang keeps a copy, or releases nothing."""
    args = manager.server_args
    if getattr(args, "enable_memory_saver", False) and not getattr(args, "enable_weights_cpu_backup", False):
        _change(manager, False)


def told(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsReq:
    """Returns the request with the fields that engine ranks need."""
    changes, last = _changes(manager)
    return msgspec.structs.replace(request, stock_changes=changes, stock_loaded=last)


def _change(manager: TokenizerManager, last: bool) -> None:
    setattr(manager, _CHANGES, (_changes(manager)[0] + 1, last))


def _changes(manager: TokenizerManager) -> tuple[int, bool]:
    known: tuple[int, bool] | None = getattr(manager, _CHANGES, None)
    if known is None:  # as the engine has started
        dummy = getattr(manager.server_args, "load_format", "auto") == "dummy"
        return (1, False) if dummy else (0, True)
    return known
