"""The methods by which a sender writes its weights to a folder instead of sending them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_reshard.sources import NamedTensors, TrainerState
from sglang_reshard.sources.names import Renaming
from sglang_reshard.trainer.background import BackgroundUpdates, UpdateHandle
from sglang_reshard.trainer.coordinator import UpdateOptions
from sglang_reshard.trainer.update_sender import UpdateSender

if TYPE_CHECKING:
    from sglang_reshard.trainer.snapshot import SnapshotReport


class SnapshotMethods:
    """Methods that `WeightSender` and `MultiEngineSender` share."""

    _background: BackgroundUpdates[Any]

    def _snapshots_of(self) -> UpdateSender:
        """Returns the sender with whose session the trainer ranks meet."""
        raise NotImplementedError

    def snapshot(
        self, named_tensors: NamedTensors | torch.nn.Module, folder: str | Path, *, name: str, **options: Any
    ) -> SnapshotReport:
        """Writes the weights to `folder`/`name`, a Hugging Face checkpoint that any engine starts from. Collective.

        Every trainer rank writes what it holds; nothing is gathered. All ranks have to see the same file system. The
        folder gets its name, and `folder`/latest leads to it, once everything is on disk.

        delta       also write what has changed since the snapshot before, for those who have it: `SnapshotFollower`
        upload      URL below which the snapshot is copied by fsspec, as an object store's
        dtype       of tensors with a floating-point dtype, "bfloat16" for example; by default each one's own
        partial, rename   see `update`
        keep        how many snapshots stay in `folder`, the newest; by default all
        copy_from   the model's folder, whose config and tokenizer files the snapshot gets
        file_bytes  of a file of weights, at most, unless one tensor has more

        Raises, on every rank: what `update` raises for weights that cannot be sent, Mismatch for a name that exists,
        ReshardError for a disk without room or rights, DeadlineExceeded if another trainer keeps the folder locked.
        Earlier snapshots stay then.
        """
        return self._snapshots_of().write_snapshot(named_tensors, Path(folder), name, options)

    def snapshot_async(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        folder: str | Path,
        *,
        name: str,
        shadow_device: torch.device | None = None,
        **options: Any,
    ) -> UpdateHandle[SnapshotReport]:
        """Copies this rank's shards, and writes them from the copy while the trainer goes on. Collective.

        For the rest see `snapshot` and `update_async`, of which only one of either runs at a time.
        """
        sender = self._snapshots_of()
        copied = UpdateOptions(name, partial=bool(options.get("partial")), rename=Renaming.of(options.get("rename")))

        def run(weights: TrainerState | NamedTensors) -> SnapshotReport:
            return sender.write_snapshot(weights, Path(folder), name, options)

        return self._background.start(
            sender, run, named_tensors, copied, latest_only=False, shadow_device=shadow_device
        )
