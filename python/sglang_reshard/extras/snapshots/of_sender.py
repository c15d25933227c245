"""Writes a sender's weights to a folder that any engine starts from, instead of sending them.

snapshots = Snapshots(sender, "/shared/run-1", keep=3)           # on every trainer rank
snapshots.write(model, "step-100")
report = snapshots.update_or_write(model, weight_version="42")   # writes if the engine's server does not answer
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
import torch

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import EngineUnreachable, Mismatch, Unsupported
from sglang_reshard.extras.asynchronous.background import UpdateHandle
from sglang_reshard.extras.snapshots.manifest import DELTA, Entry, SnapshotFile, check_snapshot_name
from sglang_reshard.extras.snapshots.upload import SnapshotStore
from sglang_reshard.extras.snapshots.writer_files import DEFAULT_FILE_BYTES, FLOATING_POINT, SnapshotFiles, write_boxes
from sglang_reshard.extras.snapshots.writer_folder import SnapshotFolder
from sglang_reshard.layout.names import Rename, Renaming, patterns
from sglang_reshard.nearest import check_one_of
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.publication import next_publication
from sglang_reshard.sources import NamedTensors, TrainerState, describe
from sglang_reshard.trainer.collectives import Gathering
from sglang_reshard.trainer.options import UpdateOptions
from sglang_reshard.trainer.publisher import Stages, Weights, check_alike
from sglang_reshard.trainer.update_sender import UpdateSender, repeatable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sglang_reshard.api.given import UnversionedUpdateGiven

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

        return self._sender.background.start(
            self._sender.participant,
            lambda weights: self._write(weights, chosen),
            named_tensors,
            copied,
            latest_only=False,
            shadow_device=shadow_device,
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

    def _write(self, weights: Weights, options: SnapshotOptions) -> SnapshotReport:
        return SnapshotWriter(self._sender.participant, self._folder, options).write(weights)

    def _chosen(self, name: str, options: SnapshotGiven) -> SnapshotOptions:
        chosen: dict[str, Any] = {**self._options, **options}
        if (source := chosen.get("copy_from")) is not None:
            chosen["copy_from"] = Path(source)
        return SnapshotOptions(name, **chosen)


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """One snapshot.

    path             the folder
    tensors, nbytes  all of them
    own_bytes        that this rank has written
    seconds          of this rank
    delta_bytes      that lead from the snapshot before to this one; None if there are no deltas of all files
    """

    path: str
    tensors: int
    nbytes: int
    own_bytes: int
    seconds: float
    delta_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """See `extras.snapshots.Snapshots`."""

    name: str
    dtype: str | None = None
    partial: bool = False
    keep: int | None = None
    copy_from: Path | None = None
    file_bytes: int = DEFAULT_FILE_BYTES
    delta: bool = False
    upload: str | None = None
    rename: Rename | None = None
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", patterns(self.ignore))
        if self.dtype is not None:
            check_one_of("dtype", self.dtype, FLOATING_POINT)


class SnapshotGiven(TypedDict, total=False):
    """The fields of `SnapshotOptions` but `name`, as they are given by name."""

    dtype: str | None
    partial: bool
    keep: int | None
    copy_from: str | Path | None
    file_bytes: int
    delta: bool
    upload: str | None
    rename: Rename | None
    ignore: Sequence[str]


class SnapshotWriter:
    """Writes one snapshot, with the writers of the other trainer ranks.

    Trainer rank 0 lays the files out and reserves their space. Every trainer rank maps them and writes the boxes that
    it holds where they belong; of several that hold the same, one does. Then the ranks divide the files among them:
    each is read back for its hash, and compared with that of the snapshot before for its delta. The folder gets its
    name when everything is on disk, so that a reader always finds a complete snapshot, even if a rank dies.
    """

    def __init__(self, sender: UpdateSender, folder: Path, options: SnapshotOptions) -> None:
        self._sender, self._folder, self._options = sender, folder, options
        self._rank, self._global_ranks = sender.ranks

    def write(self, named_tensors: Weights) -> SnapshotReport:
        """Collective. Raises, on every rank, what one of them fails with; in this case no file of the snapshot
        remains.
        """
        began, folder, options = time.perf_counter(), self._folder, self._options
        if options.keep is not None and options.keep < 1:
            raise Mismatch(f"keep={options.keep} would delete every snapshot; pass at least 1")
        check_snapshot_name(options.name)
        store: SnapshotStore | None = None
        if options.upload is not None:
            with self._phase("store"):
                store = SnapshotStore(options.upload)
        publication = next_publication()  # of these weights: an update that begins meanwhile brings later ones
        state = self._described(named_tensors)
        files = SnapshotFiles.of(state.layout, options.dtype, options.file_bytes)
        target: SnapshotFolder | None = None
        base: Entry | None = None
        try:
            with self._phase("reserve", tuple[str, str]) as reserved:
                if self._rank == 0:
                    target = SnapshotFolder(folder, options.name, self._sender.timeout_s)
                    base = target.base() if options.delta else None
                    files.reserve(target.partial)
                    reserved.own = target.partial.name, base.name if base is not None else ""
            name, before = reserved.of_all[0]
            partial = folder / name
            with self._phase("write"):
                written = write_boxes(state, files, partial, self._rank)
            with self._phase("read back", dict[str, SnapshotFile]) as read_back:
                mine = files.files[self._rank :: len(self._global_ranks)]
                read_back.own = {
                    file.name: files.described(file, partial, folder / before if before else None) for file in mine
                }
            weights = {name: file for told in read_back.of_all for name, file in told.items()}
            with self._phase("publish"):
                if target is not None:
                    files.write_index(target.partial)
                    publication = target.publish(weights, base, options.copy_from, options.keep, publication)
        finally:
            if target is not None:
                target.close()
        if store is not None:
            self._upload(store, Entry(options.name, publication), weights)
        deltas = [file.delta_bytes for file in weights.values()]
        return SnapshotReport(
            str(folder / options.name),
            len(state.layout.tensors),
            files.nbytes,
            written,
            time.perf_counter() - began,
            None if None in deltas else sum(n for n in deltas if n is not None),
        )

    def _upload(self, store: SnapshotStore, entry: Entry, weights: Mapping[str, SnapshotFile]) -> None:
        """Copies the snapshot to a store; each rank copies its part of the files."""
        written = self._folder / entry.name
        with ExitStack() as turn:
            with self._phase("turn"):
                if self._rank == 0:
                    turn.enter_context(store.turn(entry.name, self._sender.timeout_s))
            with self._phase("upload"):
                mine = sorted(weights)[self._rank :: len(self._global_ranks)]
                deltas = [name + DELTA for name in mine if weights[name].delta_bytes is not None]
                others = [p.name for p in written.iterdir() if p.name.removesuffix(DELTA) not in weights]
                store.put(written, entry.name, [*mine, *deltas, *(others if self._rank == 0 else ())])
            with self._phase("announce"):
                if self._rank == 0:
                    store.publish(entry, self._options.keep)

    def _described(self, state: Weights) -> TrainerState:
        """Returns this rank's shards in the layout of all ranks."""
        session, partial = self._sender.session, self._options.partial
        with self._phase("describe", str) as told:
            if not isinstance(state, TrainerState):
                rank, ranks = self._rank, self._global_ranks
                rename = Renaming.of(self._options.rename, self._options.ignore)
                state = describe(state, trainer_rank=rank, global_ranks=ranks, partial=partial, rename=rename)
            told.own = session.put(state.layout)
        if partial:
            return state.within(Stages.of(session, told.of_all).layout)
        check_alike(session, told.of_all, self._sender.timeout_s)
        return state

    def _phase(self, name: str, kind: Any = None) -> Gathering[Any]:
        """Returns a block that a rank may fail in: all ranks raise then, at its end.

        kind  the type of the ranks' messages at its end
        """
        snapshot, timeout_s = self._options.name, self._sender.timeout_s

        def explain(missing: list[int]) -> str:
            return (
                f"trainer ranks {missing} did not reach the end of phase '{name}' of snapshot {snapshot!r} within "
                f"{timeout_s:.0f} s. Every trainer rank must write it; look at the logs of these ranks"
            )

        # Ranks may write several snapshots at once, in the background, and not in the same order.
        key = f"snapshot/{snapshot}/{name}"
        return Gathering(self._rank, kind, lambda own: self._sender.exchange(key, own, timeout_s, explain))
