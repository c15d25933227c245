"""Reshards a trainer's DTensor shards into the live parameters of an SGLang engine, shard to shard, without a gather.

Public names are imported on first use: SGLang imports this package in every process that it starts, and most of them
use little of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sglang_reshard.version import __version__

if TYPE_CHECKING:
    from sglang_reshard.api.multi_engine import MultiEngineSender as MultiEngineSender
    from sglang_reshard.api.remote_engine import RemoteEngine as RemoteEngine
    from sglang_reshard.api.weight_sender import WeightSender as WeightSender
    from sglang_reshard.extras.finite import first_not_finite as first_not_finite
    from sglang_reshard.extras.lora_adapters import Adapter as Adapter
    from sglang_reshard.extras.modules.receiver import ModuleReceiver as ModuleReceiver
    from sglang_reshard.extras.modules.sender import ModuleSender as ModuleSender
    from sglang_reshard.extras.parameter_stream import ParameterStream as ParameterStream
    from sglang_reshard.extras.probe.probe import Probe as Probe
    from sglang_reshard.extras.realloc import ReshardPlan as ReshardPlan
    from sglang_reshard.extras.realloc import reshard as reshard
    from sglang_reshard.extras.snapshots.follower import SnapshotFollower as SnapshotFollower
    from sglang_reshard.extras.snapshots.of_sender import Snapshots as Snapshots
    from sglang_reshard.extras.verl_engine import VerlEngine as VerlEngine
    from sglang_reshard.observability.probe_report import ProbeReport as ProbeReport
    from sglang_reshard.observability.report import UpdateReport as UpdateReport
    from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput as DistributedUpdateWeightsOutput
    from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq as DistributedUpdateWeightsReq
    from sglang_reshard.protocol.weights_info import WeightsInfo as WeightsInfo
    from sglang_reshard.trainer.options import SenderOptions as SenderOptions
    from sglang_reshard.trainer.options import UpdateOptions as UpdateOptions

_DEFINED_IN = {
    "Adapter": "extras.lora_adapters",
    "DistributedUpdateWeightsOutput": "protocol.messages",
    "DistributedUpdateWeightsReq": "protocol.messages",
    "ModuleReceiver": "extras.modules.receiver",
    "ModuleSender": "extras.modules.sender",
    "MultiEngineSender": "api.multi_engine",
    "ParameterStream": "extras.parameter_stream",
    "Probe": "extras.probe.probe",
    "ProbeReport": "observability.probe_report",
    "RemoteEngine": "api.remote_engine",
    "ReshardPlan": "extras.realloc",
    "SenderOptions": "trainer.options",
    "SnapshotFollower": "extras.snapshots.follower",
    "Snapshots": "extras.snapshots.of_sender",
    "UpdateOptions": "trainer.options",
    "UpdateReport": "observability.report",
    "VerlEngine": "extras.verl_engine",
    "WeightSender": "api.weight_sender",
    "WeightsInfo": "protocol.weights_info",
    "first_not_finite": "extras.finite",
    "reshard": "extras.realloc",
}

__all__ = ["__version__", *_DEFINED_IN]


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
