"""The files of a snapshot: safetensors of whole tensors; each trainer rank writes its own boxes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import Unsupported
from sglang_reshard.extras.snapshots.delta_file import write_delta
from sglang_reshard.extras.snapshots.manifest import (
    DELTA,
    INDEX,
    METADATA,
    MOST_TENSORS,
    SUM_DIGITS,
    SnapshotFile,
    sha256_of,
)
from sglang_reshard.extras.snapshots.writer_folder import to_disk
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.layout.checkpoint_headers import DTYPES
from sglang_reshard.layout.regions import Box, Region, TensorSpec
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import RankLocation, TensorIndex, plan_reads
from sglang_reshard.routes.p2p.links import destination_view
from sglang_reshard.sources import TrainerState
from sglang_reshard.trace.program import Program

_SAFETENSORS = {name: dtype for dtype, name in DTYPES.items()}
FLOATING_POINT = tuple(name for name in _SAFETENSORS if getattr(torch, name).is_floating_point)
DEFAULT_FILE_BYTES = 5 << 30


@dataclass(frozen=True, slots=True)
class _File:
    """One file of a checkpoint.

    tensors  in the order of their bytes, each with its offset from the start of the file, in bytes
    """

    name: str
    header: bytes
    tensors: tuple[tuple[TensorSpec, int], ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, specs: Iterable[TensorSpec]) -> _File:
        table: dict[str, object] = {METADATA: {"format": "pt"}}
        begins, end = [], 0
        ordered = sorted(specs, key=lambda spec: -spec.item_bytes)  # so that each one is aligned
        for spec in ordered:
            begins.append(end)
            end += spec.nbytes
            table[spec.name] = {
                "dtype": _SAFETENSORS[spec.dtype], "shape": spec.shape, "data_offsets": [begins[-1], end]
            }  # fmt: skip
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        tensors = tuple((spec, len(header) + begin) for spec, begin in zip(ordered, begins, strict=True))
        return cls(name, header, tensors, len(header) + end)

    def mapped(self, folder: Path, *, shared: bool = False) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yields each tensor, and its elements in the mapped file: 1-D. `shared`: writes to these reach the file."""
        data = torch.from_file(str(folder / self.name), shared=shared, size=self.nbytes, dtype=torch.uint8)
        return ((spec, data[at : at + spec.nbytes].view(getattr(torch, spec.dtype))) for spec, at in self.tensors)


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """The files of a checkpoint, the same on every rank that has the layout."""

    files: tuple[_File, ...]

    @classmethod
    def of(cls, layout: SourceLayout, dtype: str | None, file_bytes: int) -> SnapshotFiles:
        """`dtype`: of tensors with a floating-point dtype; None keeps each one's own."""
        groups: list[list[TensorSpec]] = [[]]
        filled = 0
        for tensor in layout.tensors:
            if tensor.name == METADATA:
                raise Unsupported(
                    f"a tensor cannot be named {METADATA} in safetensors; pass rename= to give it another name"
                )
            spec = TensorSpec(tensor.name, tensor.shape, _written_dtype(tensor.name, tensor.dtype, dtype))
            is_full = filled + spec.nbytes > file_bytes or len(groups[-1]) == MOST_TENSORS
            if groups[-1] and is_full:
                groups.append([])
                filled = 0
            groups[-1].append(spec)
            filled += spec.nbytes
        named = ((f"model-{number:05}-of-{len(groups):05}.safetensors", g) for number, g in enumerate(groups, start=1))
        return cls(tuple(_File.of(name, group) for name, group in named))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for file in self.files for spec, _ in file.tensors)

    def reserve(self, folder: Path) -> None:
        """Creates the files with their headers, and takes their space on the disk: a full one fails here."""
        for file in self.files:
            with open(folder / file.name, "xb") as opened:
                os.posix_fallocate(opened.fileno(), 0, file.nbytes)
                opened.write(file.header)

    def write_index(self, folder: Path) -> None:
        of_tensor = {spec.name: file.name for file in self.files for spec, _ in file.tensors}
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": of_tensor}
        (folder / INDEX).write_text(json.dumps(index))

    def described(self, file: _File, folder: Path, base: Path | None) -> SnapshotFile:
        """Reads a file of `folder` back, and writes the changes since `base`'s next to it, if that takes fewer
        bytes.
        """
        path, delta_bytes = folder / file.name, None
        if base is not None:
            units = min([4, *(spec.item_bytes for spec, _ in file.tensors)])
            out = folder / (file.name + DELTA)
            delta_bytes = write_delta(base / file.name, path, out, units, file.nbytes // 2)
            if delta_bytes is not None:
                to_disk(out)
        batch = RegionBatch()
        for row, (spec, view) in enumerate(file.mapped(folder)):
            region = RegionSpec.bits(spec.shape, Region.of(Box.whole(spec.shape)), spec.item_bytes)
            batch.add(region, view.view(region.dtype), row)
        found = batch.checksums(len(file.tensors), Selection.full()).tolist()
        sums = "".join(f"{tensor:0{SUM_DIGITS}x}" for tensor in found)
        table = hashlib.sha256(file.header).hexdigest()
        return SnapshotFile(file.nbytes, sha256_of(path), delta_bytes, table, sums)

    def program(self, folder: Path) -> Program:
        """Returns copies of whole tensors into the files, which are mapped."""
        mapped = [found for file in self.files for found in file.mapped(folder, shared=True)]
        return Program.whole({spec.name: spec.shape for spec, _ in mapped}, {spec.name: view for spec, view in mapped})


def write_boxes(state: TrainerState, files: SnapshotFiles, folder: Path, trainer_rank: int) -> int:
    """Writes this rank's part of the boxes to the files, and to the disk.

    Returns its bytes, in the trainer's dtypes.
    """
    index, program = TensorIndex.of(state.layout), files.program(folder)
    ranks = state.layout.trainer_ranks
    # As one reader of everything, to whom all trainer ranks are equally near: they share what several hold.
    plan = plan_reads(index, program.copies, RankLocation(0, 1, "", ("",) * ranks))
    copies, written = CopyList(), set()
    for read in plan.reads_from(trainer_rank):
        copy, item, tensor = plan.read(read)
        copies.add(destination_view(program, plan, read), item.local_region.view(state.shards[tensor]).detach())
        written.add(copy.target)
    copies.build()
    copies.run()
    for file in files.files:
        if any(spec.name in written for spec, _ in file.tensors):
            to_disk(folder / file.name)
    return plan.traffic().get(trainer_rank, (0, 0))[0]


def _written_dtype(name: str, own: str, wanted: str | None) -> str:
    kept = own if wanted is None or not getattr(torch, own).is_floating_point else wanted
    if kept not in _SAFETENSORS:
        raise Unsupported(f"{name} has the dtype {kept}, which safetensors does not define; pass dtype=")
    return kept
