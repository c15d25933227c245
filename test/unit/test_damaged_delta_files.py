"""Delta files with numbers that lead outside of the file: refused, and the file stays as it is."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.snapshots.delta_file import apply_delta
from support.ready import CONTEXT

BLOCK, UNIT_BYTES, CHANGED = 1 << 16, 2, 8
UNITS = 2 * BLOCK
NBYTES = UNITS * UNIT_BYTES


def delta_of(counts: list[int], positions: list[int], **header: int) -> bytes:
    """A file of one chunk with these counts of two blocks, and positions in them."""
    described = {"unit_bytes": UNIT_BYTES, "nbytes": NBYTES, "chunk_bytes": NBYTES} | header
    head = json.dumps(described).encode()
    head += b" " * (-len(head) % 8)
    parts = np.array([1, CHANGED], "<i4"), np.array(counts, "<i4"), np.array(positions, "<u2"), np.ones(CHANGED, "<i2")
    return len(head).to_bytes(8, "little") + head + b"".join(part.tobytes() for part in parts)


def apply(delta: Path, base: Path, said: Connection) -> None:
    try:
        with delta.open("rb") as opened:
            apply_delta(opened, base)
        said.send("")
    except Mismatch as error:
        said.send(f"refused: {error}")


def applied(folder: Path, delta: bytes) -> tuple[int | None, str, bytes]:
    """Exit status and words of a process that applies a delta to zeros, and the file then."""
    base, file = folder / "base", folder / "delta"
    base.write_bytes(bytes(NBYTES))
    file.write_bytes(delta)
    said, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=apply, args=(file, base, theirs))
    process.start()
    theirs.close()
    process.join(120)
    return process.exitcode, said.recv() if said.poll() else "", base.read_bytes()


@pytest.mark.parametrize(
    ("counts", "positions"),
    [
        ([50_000_000, CHANGED - 50_000_000], range(CHANGED)),
        ([-3, CHANGED + 3], range(CHANGED)),
        ([CHANGED, 0], [0] * CHANGED),
        ([4, 4], [3, 2, 1, 0, 0, 1, 2, 3]),
    ],
    ids=["large counts", "negative count", "one position", "descending"],
)
def test_numbers_that_lead_elsewhere_are_refused(tmp_path: Path, counts: list[int], positions: list[int]) -> None:
    status, said, content = applied(tmp_path, delta_of(counts, list(positions)))
    assert (status, content) == (0, bytes(NBYTES))
    assert said.startswith("refused: the delta of base is damaged")
    assert "chunk 0" in said


def test_the_same_file_with_right_numbers_is_applied(tmp_path: Path) -> None:
    status, said, content = applied(tmp_path, delta_of([4, 4], [0, 1, 2, 3, 0, 1, 2, BLOCK - 1]))
    assert (status, said) == (0, "")
    found = np.frombuffer(content, "<i2")
    assert np.flatnonzero(found).tolist() == [0, 1, 2, 3, BLOCK, BLOCK + 1, BLOCK + 2, UNITS - 1]


def test_chunks_of_a_few_bytes_take_no_memory(tmp_path: Path) -> None:
    """Of a large file a table of them would have as many rows as the file has bytes, almost."""
    status, said, _ = applied(tmp_path, delta_of([4, 4], list(range(CHANGED)), chunk_bytes=8))
    assert status == 0
    assert "its chunk size of 8 bytes" in said
