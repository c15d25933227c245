"""The battery on the virtual GPUs of the tests (`test/support/virtual_gpus`): all but what only silicon does."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmark.gpu.place import GIB, MIB, Place

HOST, GPUS = "host 0", 2


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """Makes the folder that the memory of all virtual GPUs is in."""
    found = tempfile.mkdtemp(prefix="virtual-gpus-", dir="/dev/shm")
    try:
        yield found
    finally:
        shutil.rmtree(found)


def prepare() -> None:
    """Makes the tests' support importable, and Triton an interpreter. Before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    tests = str(Path(__file__).parents[2] / "test")
    if tests not in sys.path:
        sys.path.append(tests)


def preload() -> None:
    """Imports what all processes need, before they are forked."""
    from support.virtual_gpus import process  # noqa: F401


def enter(place: Place) -> None:
    """Gives this process its virtual GPUs; what is replaced stays replaced."""
    prepare()
    from support.virtual_gpus import description, process

    gpus = description.VirtualGpus(
        place.rehearsed, (HOST,), GPUS, capacity=GIB, context=4 * MIB, freed_while_mapped="undefined"
    )
    visible = place.visible[1] if place.visible is not None else tuple(range(GPUS))
    process.VirtualProcess(gpus, description.Place(HOST, visible, 0, place.allocator), place.name).install()


def clean_up_after(place: Place, pid: int) -> None:
    """Frees what a process that was killed has of the GPUs, as a driver does."""
    for file in Path(place.rehearsed, HOST).iterdir():
        owner, _, opener = file.name.partition(".open.")
        if str(pid) == (opener or owner.split(".")[1]):
            file.unlink()  # what others map, they still do
