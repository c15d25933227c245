"""Reshard a trainer's DTensor shards into a live SGLang engine, shard to shard, with no gather.

Names are imported on first use: SGLang loads this package in every process it starts, and most of
them need little of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sglang_reshard.version import __version__

if TYPE_CHECKING:
    from sglang_reshard.fleet import Fleet
    from sglang_reshard.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
    from sglang_reshard.remote import RemoteEngine
    from sglang_reshard.report import UpdateReport
    from sglang_reshard.sender import WeightSender
    from sglang_reshard.verl_engine import VerlEngine
    from sglang_reshard.weights_info import WeightsInfo

_HOME = {
    "DistributedUpdateWeightsOutput": "messages",
    "DistributedUpdateWeightsReq": "messages",
    "Fleet": "fleet",
    "RemoteEngine": "remote",
    "UpdateReport": "report",
    "VerlEngine": "verl_engine",
    "WeightSender": "sender",
    "WeightsInfo": "weights_info",
}

__all__ = [
    "DistributedUpdateWeightsOutput",
    "DistributedUpdateWeightsReq",
    "Fleet",
    "RemoteEngine",
    "UpdateReport",
    "VerlEngine",
    "WeightSender",
    "WeightsInfo",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
