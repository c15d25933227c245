"""The battery on the virtual GPUs of the tests (`test/support/virtual_gpus`): all but what only silicon does.

A virtual card has a MiB for each GiB of a real one, and items take so much less of it, so that what does not fit a real
card does not fit a virtual one, either.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from benchmark.gpu.place import GIB, MIB, SCALE, Place

HOST, GPUS = "host 0", 2
CARDS_GIB = (78, 22)  # of a card of 80 GB, and of one of 24 GB, what a process sees
_CONTEXT = 512 * MIB  # of a process on a real card


def folder() -> tempfile.TemporaryDirectory[str]:
    """Makes the folder that the memory of all virtual GPUs is in."""
    return tempfile.TemporaryDirectory(prefix="virtual-gpus-", dir="/dev/shm")


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
        place.rehearsed,
        (HOST,),
        GPUS,
        capacity=place.card_gib * GIB // SCALE,
        context=_CONTEXT // SCALE,
        freed_while_mapped="undefined",
    )
    visible = place.visible[1] if place.visible is not None else tuple(range(GPUS))
    found = process.VirtualProcess(gpus, description.Place(HOST, visible, 0, place.allocator), place.name)
    found.memory.keeps_unused = True  # as torch's allocator does
    found.install()


def clean_up(place: Place) -> None:
    """Frees what processes that are gone have of the GPUs, as a driver does."""
    for file in Path(place.rehearsed, HOST).glob("*.*"):
        owner, _, opener = file.name.removeprefix("pending.").removeprefix("writing.").partition(".open.")
        if _is_gone(int(opener or owner.split(".")[1])):
            file.unlink()  # what others map, they still do


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
