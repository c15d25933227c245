"""A server as a follower of snapshots sees it: it loads what it is told, and remembers what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_reshard.protocol.messages import LoadSnapshotOutput


class Server:
    """loaded: the tensors of each load. asked: how often it was asked to load. fails: what it raises then"""

    def __init__(self) -> None:
        self.url, self.version, self.publication, self.torn = "a server", "", 0, ""
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.asked, self.fails = 0, None

    def weights_info(self) -> Any:
        return self

    def load_snapshot(self, path: str, version: str, publication: int, *, allow_rollback: bool) -> LoadSnapshotOutput:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        if publication < self.publication and not allow_rollback:
            return LoadSnapshotOutput(False, "later weights")
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(Path(path).glob("*.safetensors")):
            tensors |= load_file(file)
        self.version, self.publication, self.torn = version, publication, ""
        self.loaded.append(tensors)
        return LoadSnapshotOutput(True)
