"""Writes a sender's weights to a folder that any engine starts from, instead of sending them.

snapshots = Snapshots(sender, "/shared/run-1", keep=3)           # on every trainer rank
snapshots.write(model, "step-100")
report = snapshots.update_or_write(model, weight_version="42")   # writes if the engine's server does not answer
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import EngineUnreachable, Unsupported
from sglang_reshard.extras.asynchronous.background import UpdateHandle
from sglang_reshard.extras.snapshots.manifest import check_snapshot_name
from sglang_reshard.extras.snapshots.writer import SnapshotOptions, SnapshotReport, SnapshotWriter
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.sources import NamedTensors, TrainerState
from sglang_reshard.trainer.options import UpdateOptions
from sglang_reshard.trainer.update_sender import repeatable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sglang_reshard.api.given import UnversionedUpdateGiven
    from sglang_reshard.extras.snapshots.writer import SnapshotGiven

_OF_UPDATE = "partial", "rename", "ignore"  # options that a snapshot in place of an update has, too
_KEPT = 3  # snapshots that stay in the folder, of those that `update_or_write` writes


class Snapshots:
    """One trainer rank's snapshots in one folder. All trainer ranks have to see the same file system.

    sender   provides the session of the trainer ranks; engines take no part
    folder   where snapshots are; it is made if it does not exist
    options  of all snapshots. `write` and `write_async` take them, too, for one:

    delta       also write the changes since the previous snapshot, for followers that have it: `SnapshotFollower`
    upload      URL below which the snapshot is copied by fsspec, as an object store's
    dtype       of tensors with a floating-point dtype, "bfloat16" for example; by default each one's own
    partial, rename, ignore   see `WeightSender.update`
    keep        number of newest snapshots that stay in `folder`; by default all
    copy_from   the model's folder, whose config and tokenizer files the snapshot gets
    file_bytes  of a file of weights, at most, unless one tensor has more
    """

    def __init__(
        self, sender: WeightSender | MultiEngineSender, folder: str | Path, **options: Unpack[SnapshotGiven]
    ) -> None:
        self._sender, self._folder, self._options = sender, Path(folder), options
        self._chosen("", {})  # raises TypeError for a name that is none

    def write(
        self, named_tensors: NamedTensors | torch.nn.Module, name: str, **options: Unpack[SnapshotGiven]
    ) -> SnapshotReport:
        """Writes the weights to `folder`/`name`, a Hugging Face checkpoint that any engine starts from. Collective.

        Every trainer rank writes its own boxes; nothing is gathered. The folder gets its name, and `folder`/latest
        leads to it, once everything is on disk.

        Raises, on every rank: what `update` raises for weights that cannot be sent, Mismatch for a name that exists,
        ReshardError for a disk without room or rights, DeadlineExceeded if another trainer keeps the folder locked. In
        this case earlier snapshots stay.
        """
        return self._write(named_tensors, self._chosen(name, options))

    def write_async(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        name: str,
        *,
        shadow_device: torch.device | None = None,
        **options: Unpack[SnapshotGiven],
    ) -> UpdateHandle[SnapshotReport]:
        """Copies this rank's shards, and writes them from the copy while the trainer continues. Collective.

        See also `write` and `WeightSender.update_async`. Only one update or snapshot of a sender runs in the background
        at a time.
        """
        chosen = self._chosen(name, options)
        copied = UpdateOptions(name, partial=chosen.partial, rename=chosen.rename, ignore=chosen.ignore)

        def run(weights: TrainerState | NamedTensors) -> SnapshotReport:
            return self._write(weights, chosen)

        return self._sender.background.start(
            self._sender.participant, run, named_tensors, copied, latest_only=False, shadow_device=shadow_device
        )

    def update_or_write(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        *,
        weight_version: str,
        **options: Unpack[UnversionedUpdateGiven],
    ) -> UpdateReport:
        """Updates the engine. If its server does not answer, writes a snapshot named `weight_version`. Collective.

        options  of `WeightSender.update`

        The report of a snapshot has success=False and transport="disk". A follower of the folder loads it, unless a
        later update has succeeded. Such snapshots have deltas, and three stay in the folder unless `keep` says
        otherwise.

        Raises the errors of `WeightSender.update` and `write`, except EngineUnreachable, and Unsupported for a sender
        to several engines: use `update(..., on_failure="exclude")` there. Raises Mismatch, before anything is sent, for
        a weight_version that cannot be the name of a snapshot.
        """
        if isinstance(self._sender, MultiEngineSender):
            raise Unsupported("update_or_write needs a WeightSender; with a MultiEngineSender use on_failure='exclude'")
        if weight_version is None:
            raise Unsupported("update_or_write needs weight_version=, which names the snapshot")
        check_snapshot_name(weight_version)
        again = repeatable(named_tensors)
        try:
            return self._sender.update(again, weight_version=weight_version, **options)
        except EngineUnreachable as error:
            chosen: dict[str, Any] = {name: given for name, given in options.items() if name in _OF_UPDATE}
            chosen |= {"keep": self._options.get("keep", _KEPT), "delta": True}
            written = self.write(again, weight_version, **chosen)
            message = f"{error} The weights were written to {written.path}"
            return msgspec.structs.replace(UpdateReport.failed(message, weight_version), transport="disk")

    def _write(
        self, weights: NamedTensors | torch.nn.Module | TrainerState, options: SnapshotOptions
    ) -> SnapshotReport:
        participant = self._sender.participant
        writer = SnapshotWriter(participant.session, *participant.ranks, participant.timeout_s)
        return writer.write(weights, self._folder, options)

    def _chosen(self, name: str, options: SnapshotGiven) -> SnapshotOptions:
        chosen: dict[str, Any] = {**self._options, **options}
        if (source := chosen.get("copy_from")) is not None:
            chosen["copy_from"] = Path(source)
        return SnapshotOptions(name, **chosen)
