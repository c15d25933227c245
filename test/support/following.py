"""A server as a follower of snapshots sees it: one engine rank that takes whatever tensors a snapshot has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.engine.targets import ReceivedAdapter
from sglang_reshard.errors import EngineRefused, Mismatch
from sglang_reshard.extras.snapshots.manifest import Entry
from sglang_reshard.extras.snapshots.source import open_snapshot, served
from sglang_reshard.protocol.messages import LoadSnapshotOutput, LoadSnapshotReq


class _Weights(ReceivedAdapter):
    def use(self) -> None:
        """The tensors are looked at where they are."""


class Server:
    """loaded: the tensors of each load. asked: how often it was asked to load. fails: what it raises then"""

    def __init__(self) -> None:
        self.url, self.version, self.publication, self.torn = "a server", "", 0, ""
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.asked, self.fails = 0, None
        self.engine_ranks = 0  # that an update has brought weights to

    def weights_info(self) -> Any:
        return self

    def load_snapshot(self, path: str, version: str, publication: int, **options: Any) -> LoadSnapshotOutput:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        asked = LoadSnapshotReq(path=path, version=version, publication=publication, timeout_s=20, **options)
        if publication < self.publication and not asked.allow_rollback:
            return LoadSnapshotOutput(False, "later weights")
        device = torch.device("cpu")
        weights = _Weights(device)
        receiver = WeightReceiver(weights, 0, 1, device)
        try:
            source = open_snapshot(Path(path), Entry(version, publication))
            with served(source, asked, staged=True) as request:
                output = receiver.update(request)
        except Mismatch as error:
            raise EngineRefused(str(error)) from error
        finally:
            receiver.close()
        if not output.success:
            raise EngineRefused(output.message)
        self.version, self.publication, self.torn, self.engine_ranks = version, publication, "", 1
        self.loaded.append({name: tensor.clone() for name, tensor in weights.tensors.items()})
        return LoadSnapshotOutput(True, read_bytes=sum(rank.received_bytes for rank in output.ranks))
