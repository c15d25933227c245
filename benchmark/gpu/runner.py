"""Runs items one after the other, each in a process of its own under a deadline, so that none can end the others."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import glob
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmark.gpu.item import Bench, Item, Row, Skip
from benchmark.gpu.place import Place

_LEAST_S = 5.0  # an item needs as much
_END_S = 20.0  # for the system to free the memory of killed processes


def run(items: Sequence[Item], place: Place, gpus: int, within_s: float = math.inf) -> Iterator[Row]:
    """Yields a row for each.

    gpus      that there are
    within_s  seconds for all of them; items for which none are left are skipped
    """
    end = time.monotonic() + within_s
    for item in items:
        left = end - time.monotonic()
        if item.gpus > gpus:
            yield _skipped(item, f"needs {item.gpus} GPUs")
        elif left < _LEAST_S:
            yield _skipped(item, f"the {within_s:.0f} s for all items were over")
        else:
            limited = dataclasses.replace(item, limit_s=min(item.limit_s, left))
            yield _run(limited, dataclasses.replace(place, name=item.name))


def _skipped(item: Item, why: str) -> Row:
    return Row(item.number, item.name, item.expected, "skipped", why, 0.0, {})


def _run(item: Item, place: Place) -> Row:
    begin = time.monotonic()
    context: Any = multiprocessing.get_context(place.start)
    link, its_end = context.Pipe()
    process = context.Process(target=_answer, args=(its_end, item, place))
    process.start()
    its_end.close()
    with contextlib.suppress(PermissionError, ProcessLookupError):  # the child does it, too: whoever is first
        os.setpgid(process.pid, process.pid)
    seen: dict[str, Any] = {}
    verdict, why = "fail", ""
    try:
        while True:
            left = begin + item.limit_s - time.monotonic()
            if not link.poll(max(0.0, left)):
                why = f"did not end within {item.limit_s:.0f} s; its stack is in the output"
                break
            kind, value = link.recv()
            if kind == "seen":
                seen.update(value)
            else:
                verdict, why = value
                break
    except (EOFError, ConnectionResetError):
        process.join(5)
        why = f"the process ended with exit code {process.exitcode}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its peers are in its process group
        process.join(_END_S)
        _wait_for_group(process.pid, _END_S)
        place.clean_up()
    return Row(item.number, item.name, item.expected, verdict, why, round(time.monotonic() - begin, 2), seen)


def _wait_for_group(group: int, timeout_s: float) -> None:
    """Waits until each process of the group has released its memory, so that the next item finds the GPU free."""
    end = time.monotonic() + timeout_s
    while any(_of_group(stat, group) for stat in glob.iglob("/proc/[0-9]*/task/*/stat")) and time.monotonic() < end:
        time.sleep(0.01)


def _of_group(stat: str, group: int) -> bool:
    try:
        text = Path(stat).read_text()
    except OSError:  # it has ended
        return False
    state, _, its_group = text.rpartition(")")[2].split()[:3]
    return int(its_group) == group and state not in "ZX"  # zombies have released theirs


def _answer(link: Connection, item: Item, place: Place) -> None:
    os.setpgid(0, 0)
    faulthandler.dump_traceback_later(item.limit_s - 2, exit=False)
    # A fork has none of its parent's OpenMP threads, and an operator that divides its work waits for them.
    torch.set_num_threads(1)
    bench = Bench(place, lambda figures: link.send(("seen", figures)))
    try:
        item.run(bench)
    except Skip as why:
        link.send(("end", ("skipped", str(why))))
    except BaseException as error:
        traceback.print_exc()
        link.send(("end", ("fail", "; ".join([*bench.faults, f"{type(error).__name__}: {error}"]))))
    else:
        verdict = "fail" if bench.faults else "skipped" if bench.open else "pass"
        link.send(("end", (verdict, "; ".join(bench.faults or bench.open))))
    os._exit(0)  # what peers and libraries do at exit is no part of it
