"""Trainer ranks and engine ranks as processes with virtual GPUs: `support.world`, and the rules at its end."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support.virtual_gpus import journal
from support.virtual_gpus.description import Place, VirtualGpus
from support.virtual_gpus.process import VirtualProcess
from support.world import Requests, Trainer, run_world


@contextlib.contextmanager
def virtual_gpus(**description: Any) -> Iterator[VirtualGpus]:
    """Makes GPUs, as `VirtualGpus` describes them; raises RuleBroken at the end if a process broke a rule."""
    with tempfile.TemporaryDirectory(prefix="virtual-gpus-", dir="/dev/shm") as folder:
        try:
            yield VirtualGpus(folder, **description)
        except journal.RuleBroken:
            raise
        except BaseException as error:
            try:
                journal.check(folder)
            except journal.RuleBroken as broken:
                raise journal.RuleBroken(f"{broken}\n\n{error}") from error
            raise
        journal.check(folder)


def run_with_gpus(
    gpus: VirtualGpus,
    trainers: Sequence[Place],
    engines: Sequence[Place],
    train: Callable[..., Any],
    serve: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """As `run_world`, with a place for each rank.

    train  is called with the trainer, its VirtualProcess and `args`
    serve  with the engine rank, the number of engine ranks, the requests, its VirtualProcess and `args`
    """
    jobs = gpus, tuple(trainers), tuple(engines), train, serve, args
    return run_world(len(trainers), len(engines), _train, _serve, *jobs, **options)


def run_tasks(task: Callable[..., Any], *places: Place, told: list[Any] | None = None, **description: Any) -> list[Any]:
    """Returns what `task(process, trainer)` returns on each of these places; there are no engine ranks.

    told  gets that too, before a rule that was broken is raised
    """
    told = [] if told is None else told
    with virtual_gpus(**{"gpus": 4, **description}) as found:
        told += run_with_gpus(found, places, [], _call, _nothing, task)[0]
        assert not left_over(found)
    return told


def _call(trainer: Trainer, process: VirtualProcess, task: Callable[..., Any]) -> Any:
    process.cuda.synchronize(process.device)
    return task(process, trainer)


def _nothing(*_: Any) -> None:
    """Instead of engine ranks."""


def left_over(gpus: VirtualGpus) -> list[str]:
    """Returns mappings of memory, by file name."""
    return sorted(str(f.relative_to(gpus.folder)) for f in Path(gpus.folder).glob("*/*.open.*"))


def _train(trainer: Trainer, gpus: VirtualGpus, trainers: Any, engines: Any, train: Any, serve: Any, args: Any) -> Any:
    gc.freeze()  # so that later collections look at what the test makes
    process = VirtualProcess(gpus, trainers[trainer.rank], f"trainer rank {trainer.rank}").install()
    return train(trainer, process, *args)


def _serve(
    rank: int, size: int, requests: Requests, gpus: VirtualGpus, trainers: Any, engines: Any, train: Any, serve: Any,
    args: Any,
) -> Any:  # fmt: skip
    gc.freeze()
    process = VirtualProcess(gpus, engines[rank], f"engine rank {rank}").install()
    return serve(rank, size, requests, process, *args)
