"""The files of a snapshot: safetensors of whole tensors; each trainer rank writes its own boxes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.errors import Unsupported
from sglang_reshard.extras.snapshots.delta_file import write_delta
from sglang_reshard.extras.snapshots.manifest import DELTA, SUM_DIGITS, SnapshotFile, sha256_of
from sglang_reshard.extras.snapshots.tensor_files import INDEX, METADATA, MOST_TENSORS
from sglang_reshard.extras.snapshots.writer_folder import to_disk
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.selection import Selection
from sglang_reshard.layout.checkpoint_headers import DTYPES
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
    """One file of a checkpoint. offsets: of each tensor, in bytes from the start of the file"""

    name: str
    header: bytes
    offsets: dict[str, int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """The files of a checkpoint, the same on every rank that has the layout."""

    files: tuple[_File, ...]
    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    nbytes: int

    @classmethod
    def of(cls, layout: SourceLayout, dtype: str | None, file_bytes: int) -> SnapshotFiles:
        """`dtype`: of tensors with a floating-point dtype; None keeps each one's own."""
        dtypes = {t.name: _written_dtype(t.name, t.dtype, dtype) for t in layout.tensors}
        if METADATA in dtypes:
            raise Unsupported(
                f"a tensor cannot be named {METADATA} in safetensors; pass rename= to give it another name"
            )
        sizes = {t.name: math.prod(t.shape) * _item_bytes(dtypes[t.name]) for t in layout.tensors}
        groups: list[list[str]] = [[]]
        filled = 0
        for tensor in layout.tensors:
            is_full = filled + sizes[tensor.name] > file_bytes or len(groups[-1]) == MOST_TENSORS
            if groups[-1] and is_full:
                groups.append([])
                filled = 0
            groups[-1].append(tensor.name)
            filled += sizes[tensor.name]
        shapes = {t.name: t.shape for t in layout.tensors}
        files = []
        for number, names in enumerate(groups, start=1):
            names.sort(key=lambda name: -_item_bytes(dtypes[name]))  # so that each one is aligned
            described: dict[str, object] = {METADATA: {"format": "pt"}}
            offsets, begin = {}, 0
            for name in names:
                end = begin + sizes[name]
                described[name] = {
                    "dtype": _SAFETENSORS[dtypes[name]], "shape": list(shapes[name]), "data_offsets": [begin, end]
                }  # fmt: skip
                offsets[name], begin = begin, end
            text = json.dumps(described).encode()
            text += b" " * (-len(text) % 8)
            header = len(text).to_bytes(8, "little") + text
            files.append(
                _File(
                    f"model-{number:05}-of-{len(groups):05}.safetensors",
                    header,
                    {name: len(header) + at for name, at in offsets.items()},
                    len(header) + begin,
                )
            )
        return cls(tuple(files), dtypes, shapes, sum(sizes.values()))

    def reserve(self, folder: Path) -> None:
        """Creates the files with their headers, and takes their space on the disk: a full one fails here."""
        for file in self.files:
            with open(folder / file.name, "xb") as opened:
                os.posix_fallocate(opened.fileno(), 0, file.nbytes)
                opened.write(file.header)

    def write_index(self, folder: Path) -> None:
        of_tensor = {name: file.name for file in self.files for name in file.offsets}
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": of_tensor}
        (folder / INDEX).write_text(json.dumps(index))

    def described(self, file: _File, folder: Path, base: Path | None) -> SnapshotFile:
        """Reads a file of `folder` back, and writes the changes since `base`'s next to it, if that takes fewer
        bytes.
        """
        path, delta_bytes = folder / file.name, None
        if base is not None:
            units = min([4, *(_item_bytes(self.dtypes[name]) for name in file.offsets)])
            out = folder / (file.name + DELTA)
            delta_bytes = write_delta(base / file.name, path, out, units, file.nbytes // 2)
            if delta_bytes is not None:
                to_disk(out)
        sums = "".join(f"{tensor:0{SUM_DIGITS}x}" for tensor in self._sums(file, path))
        table = hashlib.sha256(file.header).hexdigest()
        return SnapshotFile(file.nbytes, sha256_of(path), delta_bytes, table, sums)

    def _sums(self, file: _File, path: Path) -> list[int]:
        """Returns the checksum of each tensor of a file, in the order of their bytes, see `landings.checked`."""
        mapped, batch = torch.from_file(str(path), size=file.nbytes, dtype=torch.uint8), RegionBatch()
        for row, (name, at) in enumerate(file.offsets.items()):
            spec = RegionSpec.whole(self.shapes[name], _item_bytes(self.dtypes[name]))
            view = mapped[at : at + math.prod(spec.shape) * spec.dtype.itemsize].view(spec.dtype)
            batch.add(spec, view, row)
        found: list[int] = batch.checksums(len(file.offsets), Selection.full()).tolist()
        return found

    def program(self, folder: Path) -> Program:
        """Returns copies of whole tensors into the files, which are mapped."""
        targets: dict[str, torch.Tensor] = {}
        for file in self.files:
            mapped = torch.from_file(str(folder / file.name), shared=True, size=file.nbytes, dtype=torch.uint8)
            for name, at in file.offsets.items():
                dtype = getattr(torch, self.dtypes[name])
                targets[name] = mapped[at : at + math.prod(self.shapes[name]) * dtype.itemsize].view(dtype)
        return Program.whole(self.shapes, targets)


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
        if not written.isdisjoint(file.offsets):
            to_disk(folder / file.name)
    return plan.traffic().get(trainer_rank, (0, 0))[0]


def _written_dtype(name: str, own: str, wanted: str | None) -> str:
    kept = own if wanted is None or not getattr(torch, own).is_floating_point else wanted
    if kept not in _SAFETENSORS:
        raise Unsupported(f"{name} has the dtype {kept}, which safetensors does not define; pass dtype=")
    return kept


def _item_bytes(dtype: str) -> int:
    item: torch.dtype = getattr(torch, dtype)
    return item.itemsize
