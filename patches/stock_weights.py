"""Notes which weights an engine has when no update has brought them: none, SGLang's own, or lost ones.

    stock_weights.loaded(manager)      # SGLang has loaded all weights, from disk
    stock_weights.released(manager)    # by release_memory_occupation
    stock_weights.written(manager)     # an update has written weights, ours or SGLang's
    stock_weights.missing(manager)     # why the engine has none that may answer a request
    request = stock_weights.told(manager, request)

Engine ranks are told, who do not see what SGLang itself does: an update that leaves parameters as they are (`frozen=`,
`only=`) is refused where nothing has brought them, see `engine.unread`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sglang_reshard.patches.attached import attached
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

SERVE_DUMMY = "SGLANG_RESHARD_SERVE_DUMMY"


@dataclass
class StockWeights:
    """Counts the changes that SGLang itself makes to the weights."""

    changes: tuple[int, bool] | None = None  # how often it has changed them, and whether the last time was a load
    written: int = 0  # after how many of these changes an update has written weights


def loaded(manager: TokenizerManager) -> None:
    _change(manager, True)


def released(manager: TokenizerManager) -> None:
    """Notes that weights were released: their values are lost, unless SGLang keeps a copy, or releases nothing."""
    args = manager.server_args
    if getattr(args, "enable_memory_saver", False) and not getattr(args, "enable_weights_cpu_backup", False):
        _change(manager, False)


def written(manager: TokenizerManager) -> None:
    """Notes that an update has written weights. SGLang's own may have written some of them; it does not say which is
    the last one.
    """
    attached(manager, StockWeights).written = _changes(manager)[0]
    if getattr(manager, "initial_weights_loaded", True) is False:  # its server waits for weights before it is ready
        manager.initial_weights_loaded = True


def missing(manager: TokenizerManager) -> str:
    """Returns why the engine has no weights that may answer a request; empty if it has."""
    changes, last = _changes(manager)
    stock = attached(manager, StockWeights)
    if last or stock.written == changes or os.environ.get(SERVE_DUMMY) == "1":
        return ""
    if stock.changes is None:
        return (
            "the engine started on dummy weights, and no update has brought others yet; update it, or set "
            f"{SERVE_DUMMY}=1 in its environment to serve dummy weights"
        )
    return "the engine has released its weights, and no update has brought new ones since; update it"


def told(manager: TokenizerManager, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsReq:
    """Returns the request with the fields that engine ranks need."""
    changes, last = _changes(manager)
    return msgspec.structs.replace(request, stock_changes=changes, stock_loaded=last)


def _change(manager: TokenizerManager, last: bool) -> None:
    attached(manager, StockWeights).changes = _changes(manager)[0] + 1, last


def _changes(manager: TokenizerManager) -> tuple[int, bool]:
    if (known := attached(manager, StockWeights).changes) is not None:
        return known
    dummy = getattr(manager.server_args, "load_format", "auto") == "dummy"  # as the engine has started
    return (1, False) if dummy else (0, True)
