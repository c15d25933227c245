"""A trainer rank's side: computes what its shards contribute to the checksums that engine ranks must have."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_reshard.errors import Aborted, Mismatch
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.coefficients import tensor_coefficients
from sglang_reshard.landings.checked.messages import ChecksAsk, Checksums, PartialChecksums, summed
from sglang_reshard.landings.checked.regions import RegionSet, Selection, groups_of, num_groups
from sglang_reshard.landings.checked.whole_model import region_coefficients
from sglang_reshard.layout.names import renamed
from sglang_reshard.layout.regions import ITEM_BYTES, Box, LocalRegion, Region
from sglang_reshard.layout.shard_map import ShardBox
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import TensorIndex
from sglang_reshard.plan.tensor_index import TensorClass
from sglang_reshard.protocol.messages import Failure, Outcome, Question, decode
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.update_channel import TrainerChannel

if TYPE_CHECKING:
    from sglang_reshard.trainer.publisher import PublishedShards

# What checksums were computed for: content hashes of the regions of all engine ranks and of names, and
# `PublishedShards.identity`.
_Key = tuple[tuple[str, ...], str, tuple[object, ...]]
_SAME_VERSION = "Run the same version of sglang-reshard on trainer and engine."


class SourceChecksums:
    """One trainer rank's part of the checksums of all engine ranks. Holds views of its shards, but no other memory.

    shards   in the layout's order, see `TrainerState`
    regions  that engine ranks keep, one set per engine rank

    An element is counted by one of the trainer ranks that hold it; which one depends on the tensor, so that ranks that
    hold replicas share the work. Regions that several engine ranks keep are read once.

    Raises Mismatch if an engine rank keeps regions that the layout does not have.
    """

    def __init__(
        self, layout: SourceLayout, shards: Sequence[torch.Tensor], trainer_rank: int, regions: Sequence[RegionSet]
    ) -> None:
        tensor_index = TensorIndex.of(layout)
        self._tensors = len(layout.tensors)
        self._of_engine_rank: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        views: dict[tuple[str, Region], int] = {}
        rows: dict[tuple[int, int], int] = {}  # by tensor and by how some engine rank views it
        for engine_rank, own in enumerate(regions):
            _check(own, engine_rank, tensor_index)
            view_of = [views.setdefault((kind.dtype, kind.region), len(views)) for kind in own.kinds]
            tensors, kinds = own.columns()
            pairs = zip(tensors.tolist(), kinds.tolist(), strict=True)
            own_rows = np.array([rows.setdefault((t, view_of[k]), len(rows)) for t, k in pairs], np.int64)
            factors = tensor_coefficients(tensors) * np.array([kind.copies for kind in own.kinds], np.uint64)[kinds]
            self._of_engine_rank.append((own_rows, groups_of(tensors, self._tensors), factors))
        self._num_rows = len(rows)
        self._batch = RegionBatch()
        numbers = np.array(list(rows), np.int64).reshape(-1, 2)
        self._model_factors = region_coefficients(tensor_index, numbers[:, 0], numbers[:, 1], list(views))
        shares = _Shares(tensor_index, list(views), trainer_rank)
        for (tensor, view), row in rows.items():
            for spec, region in shares.of(tensor, view):
                self._batch.add(spec, region.view(shards[tensor]), row)

    def compute(self, selection: Selection) -> PartialChecksums:
        """Returns the part for the current values of the shards."""
        found = np.zeros((len(self._of_engine_rank), num_groups(self._tensors)), np.uint64)
        own = self._batch.checksums(self._num_rows, selection)
        for of_rank, (rows, groups, factors) in zip(found, self._of_engine_rank, strict=True):
            np.add.at(of_rank, groups, own[rows] * factors)
        model = None
        if self._model_factors is not None and selection == Selection.full():
            model = int((own * self._model_factors).sum(dtype=np.uint64))
        return PartialChecksums(found.astype("<u8", copy=False).tobytes(), model)


_Share = list[tuple[RegionSpec, LocalRegion]]


class _Shares:
    """The parts of a viewed tensor that a trainer rank counts. Computes them once per tensor class."""

    def __init__(self, tensor_index: TensorIndex, views: Sequence[tuple[str, Region]], trainer_rank: int) -> None:
        self._index, self._views, self._rank = tensor_index, views, trainer_rank
        self._known: dict[tuple[int, int, int], _Share] = {}
        self._class_of = tensor_index.class_of.tolist()
        self._turn_of = (tensor_coefficients(np.arange(len(self._class_of))) >> np.uint64(32)).tolist()
        self._turns = [math.lcm(*(len(shard.ranks) for shard in c.shard_map.shards)) for c in tensor_index.classes]

    def of(self, tensor: int, view: int) -> _Share:
        """Returns (elements, where they are in this rank's local tensor) pairs."""
        number = self._class_of[tensor]
        key = number, view, self._turn_of[tensor] % self._turns[number]
        if key not in self._known:
            self._known[key] = self._compute(self._index.classes[number], *self._views[view], key[-1])
        return self._known[key]

    def _compute(self, of: TensorClass, dtype: str, region: Region, turn: int) -> _Share:
        first: dict[Box, ShardBox] = {}
        for shard in of.shard_map.shards:
            first.setdefault(shard.box, shard)
        found = []
        for shard in first.values():
            if shard.ranks[turn % len(shard.ranks)] == self._rank and (common := region.intersect(shard.box)):
                spec = RegionSpec.of(of.shape, common[0], getattr(torch, dtype), dtype != of.dtype)
                found.append((spec, of.shard_map.to_local(shard, common[0])))
        return found


def _check(regions: RegionSet, engine_rank: int, tensor_index: TensorIndex) -> None:
    """Raises Mismatch unless the layout has all regions, which come from another process."""
    complete = len(regions.tensors) == len(regions.kind_of) and len(regions.kind_of) % 4 == 0
    tensors, kinds = regions.columns() if complete else (np.full(1, -1), np.full(1, -1))
    if not (_are_below(tensors, len(tensor_index.class_of)) and _are_below(kinds, len(regions.kinds))):
        raise Mismatch(
            f"engine rank {engine_rank} requests checksums of tensors that are not in the trainer's layout. "
            f"{_SAME_VERSION}"
        )
    pairs, firsts = np.unique(np.stack([tensor_index.class_of[tensors], kinds]), axis=1, return_index=True)
    for (number, kind), first in zip(pairs.T.tolist(), firsts.tolist(), strict=True):
        requested = regions.kinds[kind]
        if requested.dtype not in ITEM_BYTES or not requested.region.is_within(tensor_index.classes[number].shape):
            tensor = tensor_index.layout.tensors[tensors[first]]
            raise Mismatch(
                f"engine rank {engine_rank} requests a checksum of {tensor.name} as {requested}, but it is "
                f"{tensor.dtype} {tensor.shape} in the trainer's layout. {_SAME_VERSION}"
            )


def _are_below(numbers: np.ndarray, end: int) -> bool:
    return not len(numbers) or bool(numbers.min() >= 0 and numbers.max() < end)


class TrainerChecks:
    """Answers on one trainer rank, of `size`. Keeps checksums, and the views that they are of, between updates."""

    def __init__(self, session: Session, trainer_rank: int, size: int, timeout_s: float) -> None:
        self._session, self._rank, self._size, self._timeout_s = session, trainer_rank, size, timeout_s
        self._known: dict[_Key, SourceChecksums] = {}
        self._used: dict[_Key, SourceChecksums] = {}  # in this update
        self._answered: list[tuple[SourceChecksums, Selection, PartialChecksums]] = []

    def answer(
        self,
        channel: TrainerChannel,
        question: Question,
        published: Callable[[], PublishedShards],
        shards: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        """Computes checksums. On trainer rank 0, also those of all trainer ranks together, for the engines."""
        try:
            ask = decode(question.message, ChecksAsk)
            checksums = self._checksums(ask, published(), shards)
            found = checksums.compute(ask.selection)
            self._answered.append((checksums, ask.selection, found))
            part = Outcome(found)
        except Exception as error:
            part = Outcome(None, Failure.on(self._rank, error))
        with contextlib.suppress(Aborted):  # the results report it
            if self._rank == 0:
                self._answer_all(channel, question, part)
            else:
                channel.put_part(self._rank, question, part)

    def end(self, update: int, writable: bool) -> None:
        """Ends an update. Drops what it has not used, unless it has used nothing.

        writable  peers could write to the shards. Nobody but the trainer does, and not during an update; but a route
                  may register memory so that peers could, and an optimizer step must not use what they have written

        Raises Mismatch if shards that are `writable` are not what they were when their checksums were sent.
        """
        answered, self._answered = self._answered, []
        self._known, self._used = self._used or self._known, {}
        if writable and any(of.compute(selection) != part for of, selection, part in answered):
            raise Mismatch(
                f"the shards of trainer rank {self._rank} changed during update {update}, while peers could write to "
                "them. Do not train on them: load a checkpoint, and look for processes on this network that are not "
                "part of the job. If this rank itself writes to its weights during an update, prevent that"
            )

    def release(self) -> None:
        """Drops the views that keep the shards' memory."""
        self._known, self._used, self._answered = {}, {}, []

    def _answer_all(self, channel: TrainerChannel, question: Question, own: Outcome[PartialChecksums]) -> None:
        """Answers the engines with the sums of all trainer ranks' parts, or with the failure of one."""
        engine_ranks = len(decode(question.message, ChecksAsk).regions)
        try:
            others = channel.collect_parts(question, PartialChecksums, self._size, self._timeout_s)
            answers = [Outcome(sums) for sums in summed([part.result() for part in (own, *others)], engine_ranks)]
        except Aborted:
            raise
        except Exception as error:
            answers = [Outcome[Checksums](failure=Failure.of(error))] * engine_ranks
        channel.put_answers(question, answers)

    def _checksums(
        self, ask: ChecksAsk, published: PublishedShards, shards: Callable[[], Sequence[torch.Tensor]]
    ) -> SourceChecksums:
        key = ask.regions, ask.names, published.identity
        known = self._used.get(key) or self._known.get(key)
        self._used[key] = known or self._compute(ask, published, shards())
        return self._used[key]

    def _compute(self, ask: ChecksAsk, published: PublishedShards, shards: Sequence[torch.Tensor]) -> SourceChecksums:
        regions: dict[str, RegionSet] = {}
        for rank, digest in enumerate(ask.regions):
            if digest not in regions:
                what = f"the regions of engine rank {rank}"
                regions[digest] = self._session.get(digest, RegionSet, what, self._timeout_s)
        source = published.source
        if ask.names:
            what = "the names that the engine's loader reads"
            source = renamed(source, self._session.get(ask.names, tuple[str, ...], what, self._timeout_s))
        return SourceChecksums(source, shards, self._rank, [regions[digest] for digest in ask.regions])
