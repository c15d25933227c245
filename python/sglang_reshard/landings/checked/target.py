"""An engine rank's side: computes checksums of its memory, requests the trainer's, and compares them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.coefficients import tensor_coefficients
from sglang_reshard.landings.checked.messages import CHANGED_UNDER_WAY, ChecksAsk, Checksums
from sglang_reshard.landings.checked.regions import RegionKind, RegionSet, Selection, groups_of, num_groups
from sglang_reshard.landings.checked.whole_model import with_kept
from sglang_reshard.layout.regions import Region
from sglang_reshard.plan import TensorIndex
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, Question, encode
from sglang_reshard.protocol.session import Session
from sglang_reshard.shown_names import some_names

if TYPE_CHECKING:
    from sglang_reshard.engine.context import UpdateContext
    from sglang_reshard.trace.program import Copy, Program


class TargetChecksums:
    """Checksums of the tensors that a traced program's copies write. Holds views of live memory, but no other memory.

    regions  for the trainer ranks, which compute the checksums that these must equal
    """

    def __init__(self, tensor_index: TensorIndex, program: Program) -> None:
        self._names = [tensor.name for tensor in tensor_index.layout.tensors]
        copies: dict[tuple[int, str, Region], list[Copy]] = {}
        for copy in program.copies:
            dtype = str(program.targets[copy.target].dtype).removeprefix("torch.")
            copies.setdefault((tensor_index.index_of[copy.source], dtype, copy.region), []).append(copy)
        self.regions = RegionSet.of(
            (tensor, RegionKind(dtype, region, len(same))) for (tensor, dtype, region), same in copies.items()
        )
        self._batch = RegionBatch()
        self._arriving: dict[str, list[tuple[int, RegionSpec, Copy]]] = {}
        for row, (tensor, kind) in enumerate(self.regions):
            of = tensor_index.tensor_class(tensor)
            spec = RegionSpec.of(of.shape, kind.region, getattr(torch, kind.dtype), kind.dtype != of.dtype)
            for copy in copies[tensor, kind.dtype, kind.region]:
                if copy.target in program.arrivals:
                    self._arriving.setdefault(copy.target, []).append((row, spec, copy))
                else:
                    self._batch.add(spec, copy.destination(program.targets[copy.target]), row)
        self._batches: list[tuple[RegionBatch, np.ndarray]] = []  # with its rows, by turn
        self._arrived = np.zeros(len(self.regions), np.uint64)
        self._selection: Selection | None = None
        self._tensors, _ = self.regions.columns()
        self._group = groups_of(self._tensors, len(self._names))

    def place(self, program: Program, arriving: Sequence[Collection[str]]) -> None:
        """`program` has memory for converted weights; `arriving` are the targets that are complete after each turn."""
        self._batches = []
        for targets in arriving:
            batch, rows = RegionBatch(), []
            for row, spec, copy in (found for target in targets for found in self._arriving.get(target, ())):
                batch.add(spec, copy.destination(program.targets[copy.target]), row)
                rows.append(row)
            self._batches.append((batch, np.unique(np.array(rows, np.int64))))

    def begin(self, selection: Selection) -> None:
        """Must be called before the copies of an update, with the arguments of the later `compute`."""
        self._selection = selection

    def arrived(self, turn: int) -> None:
        """Must be called before complete weights are converted. Elements that arrive again, from another rank, count
        once.
        """
        assert self._selection is not None, "begin() comes first"
        batch, rows = self._batches[turn]
        self._arrived[rows] = batch.checksums(len(self._arrived), self._selection)[rows]

    def compute(self, selection: Selection) -> np.ndarray:
        """Returns uint64 [groups], of the current live memory, and of the arrived weights before they were quantized.

        Must be called after all copies of an update and before its local steps, which may overwrite what was copied.
        """
        found = np.zeros(num_groups(len(self._names)), np.uint64)
        own = self._batch.checksums(len(self.regions), selection) + self._arrived
        np.add.at(found, self._group, own * tensor_coefficients(self._tensors))
        return found

    def tensor_names(self, groups: Iterable[int]) -> str:
        """Returns the names of the tensors that this rank keeps in these groups, the first few of them."""
        among = self._tensors[np.isin(self._group, list(groups))]
        names = [self._names[number] for number in np.unique(among).tolist()]
        return some_names(names)


class Checks:
    """Compares the arrived weights with those of the trainer ranks, by checksums: what is converted, before it is."""

    def __init__(self, program: Program, index: TensorIndex, session: Session, names: Sequence[str]) -> None:
        """Publishes the regions. `names`: of the tensors in the digest; empty for the layout's own."""
        self._checksums = TargetChecksums(index, program)
        self._regions = session.put(self._checksums.regions)
        self._names = session.put(tuple(names)) if names else ""
        self.place, self.arrived = self._checksums.place, self._checksums.arrived

    def connect(self, gather: Callable[[str, Any], list[Any]], kept: tuple[str, ...]) -> None:
        """Exchanges the content hashes of the engine ranks' regions."""
        self._of_ranks, self._kept = tuple(gather("regions", self._regions)), kept

    def begin(self, update: UpdateContext) -> None:
        if update.rank == 0:  # asks for all
            update.channel.ask(self._question(update.request))
        self._checksums.begin(_selection(update.request))

    def compare(self, update: UpdateContext) -> str:
        """See `Landing.check`. The digest is known on engine rank 0, and only if all weights were compared, in full."""
        request = update.request
        actual = self._checksums.compute(_selection(request))
        question = self._question(request)
        expected = update.channel.answer(question, Checksums, update.rank, request.timeout_s)
        if len(differing := np.flatnonzero(actual != expected.values)):
            raise Mismatch(
                "the received weights differ from the trainer's: "
                f"{self._checksums.tensor_names(differing.tolist())}. {CHANGED_UNDER_WAY}"
            )
        return with_kept(expected.model, self._kept) if update.rank == 0 and request.verify == "full" else ""

    def _question(self, request: DistributedUpdateWeightsReq) -> Question:
        return Question(encode(ChecksAsk(self._of_ranks, _selection(request), self._names)))


def _selection(request: DistributedUpdateWeightsReq) -> Selection:
    """Returns the elements that are compared: all, or a sample that differs from update to update."""
    return Selection.full() if request.verify == "full" else Selection.sample(request.update)
