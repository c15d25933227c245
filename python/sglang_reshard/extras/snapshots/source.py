"""Describes a snapshot on this host as the source of an update: engine ranks read its files by the route `disk`.

source = open_snapshot(path, entry)
with served(source, asked, staged=False) as request:    # a session that this process hosts, in place of a trainer
"""

from __future__ import annotations

import functools
import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.snapshots.folders import LocalFolder, manifest
from sglang_reshard.extras.snapshots.manifest import (
    SAFETENSORS,
    SUM_DIGITS,
    Entry,
    check_kinds,
    check_size,
    note_tensors,
    read_table,
)
from sglang_reshard.layout.names import ignored_remark, matches_any
from sglang_reshard.layout.source_layout import Mesh, Placement, SourceLayout, SourceTensor
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, LoadGiven, LoadSnapshotReq
from sglang_reshard.protocol.session import LOOPBACK, Session
from sglang_reshard.protocol.validation import check_request
from sglang_reshard.routes.disk.messages import DiskFile, DiskFiles, put_files
from sglang_reshard.trainer.publisher import heads
from sglang_reshard.version import PROTOCOL, __version__

_UPDATE = 1  # the only one of a session


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """A snapshot's tensors, and their places in its files.

    remark names the tensors that are left out; empty if none are
    equal  fnmatch patterns of the names of heads that are their embeddings bit for bit
    apart  name -> why another head is not
    """

    layout: SourceLayout
    files: DiskFiles
    remark: str
    equal: tuple[str, ...]
    apart: dict[str, str]


def open_snapshot(path: Path, entry: Entry, ignore: Sequence[str] = ()) -> SnapshotSource:
    """Reads the manifest and the tables of tensors of the snapshot `entry` in the folder `path`; no weights.

    ignore  fnmatch patterns of names of tensors to leave out

    Raises Mismatch, naming a file, for a folder that is not that snapshot, or whose files are not as it says.
    """
    if not path.is_absolute():
        raise Mismatch(f"{path} is not an absolute path; pass the path of the snapshot on the server's host")
    folder, name = LocalFolder(path.parent), path.name
    snapshot = manifest(folder, name, entry)

    where = functools.partial(folder.where, name)
    check_kinds(snapshot, where)
    files: list[DiskFile] = []
    tensors: list[SourceTensor] = []
    ignored: list[str] = []
    sums: list[int] = []
    of_tensor: dict[str, str] = {}
    places: list[tuple[int, int]] = []
    for file_name, file in sorted(snapshot.files.items()):
        if not file_name.endswith(SAFETENSORS):
            continue
        with folder.open(name, file_name) as (opened, nbytes):
            check_size(nbytes, file, where(file_name))
            table = read_table(opened, nbytes, where(file_name))
        note_tensors(of_tensor, table, file_name, where(file_name))
        if (table.sha256, SUM_DIGITS * len(table.tensors)) != (file.table, len(file.sums)):
            raise Mismatch(f"{where(file_name)} has another table of tensors than its manifest")
        for number, (spec, offset) in enumerate(table.tensors):
            if matches_any(spec.name, ignore):
                ignored.append(spec.name)
                continue
            places.append((len(files), offset))
            sums.append(int(file.sums[SUM_DIGITS * number : SUM_DIGITS * (number + 1)], 16))
            tensors.append(SourceTensor(spec.name, spec.shape, spec.dtype, 0, 0))
        files.append(DiskFile(file_name, nbytes, table.nbytes, table.sha256))
    if ignored and not tensors:
        raise Mismatch(f"snapshot {snapshot.name} has no tensors but those that ignore={list(ignore)} leaves out")
    layout = SourceLayout(1, (Mesh((1,), (0,)),), ((Placement(),),), tuple(tensors))
    of_file, offsets = zip(*places, strict=True) if places else ((), ())
    found = DiskFiles(snapshot.name, str(path), tuple(files), tuple(of_file), tuple(offsets), tuple(sums))
    return SnapshotSource(layout, found, ignored_remark(ignored), *_judged(layout, found))


def _judged(layout: SourceLayout, files: DiskFiles) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the heads that are their embeddings, and why others are not, by the checksums of both."""
    sums, equal, apart = files.sums, [], {}
    for head, of, number, of_number in heads(layout):
        if head.dtype == of.dtype and sums[number] == sums[of_number]:
            equal.append(glob.escape(head.name))
        else:
            apart[head.name] = f"snapshot {files.snapshot}: {head.name} differs from {of.name}"
    return tuple(equal), apart


@contextmanager
def served(
    source: SnapshotSource, asked: LoadSnapshotReq, *, staged: bool, interface: str = LOOPBACK
) -> Iterator[DistributedUpdateWeightsReq]:
    """Yields the request of an update that brings the snapshot. The end of the block ends the update.

    interface  address of this host at which all engine ranks reach it

    Raises Mismatch for options that are invalid.
    """
    given: dict[str, Any] = {option: getattr(asked, option) for option in LoadGiven.__annotations__}
    session = Session.host(interface, asked.timeout_s)
    try:
        layout = session.put(source.layout)
        put_files(session, source.files)
        request = DistributedUpdateWeightsReq(
            address=session.address,
            update=_UPDATE,
            layout=layout,
            handles=("",),
            trainer_hosts=("",),  # no memory of any host
            weight_version=asked.version,
            transport="disk",
            apart=source.apart,
            verify="full",
            publication=asked.publication,
            package_version=__version__,
            protocol=PROTOCOL,
            **given | {"staged": staged, "ignore": (*asked.ignore, *source.equal)},
        )
        check_request(request)
        with session.trainer_channel(_UPDATE, f"the server that loads snapshot {asked.version}"):
            yield request
    finally:
        session.end(1)
