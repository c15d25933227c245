"""A process that has imported SGLang once and forks the ranks of one pair after another.

SGLang chooses between GPU and CPU code paths when it is imported, and a process can be one rank of one engine
only; so each kind of code path has a host of its own, and each rank is a fork of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

from pairs import Pair
from support import zygote

PAIR_S = 450.0  # for one pair on a busy machine
START_S = 400.0  # for the imports before the first
_SPAWN = multiprocessing.get_context("spawn")


class PairHost:
    """The test's end of it. `run` a pair; the process and its forks are gone when the `with` ends."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=serve_pairs, args=(kind, folder, theirs))
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", zygote.VARIABLE: kind}):
            self._process.start()
        theirs.close()

    def run(self, pair: Pair, *, spoiled: bool = False) -> dict[str, Any]:
        """What the ranks of a pair returned: {"trainers": [...], "engines": [...]}."""
        self._pipe.send((pair, spoiled))
        # The host keeps the pair's deadline itself; this is for a host that hangs.
        assert self._pipe.poll(PAIR_S + START_S), "the host of pairs hangs"
        found: dict[str, Any] = self._pipe.recv()
        assert "failed" not in found, found["failed"]
        return found

    def __enter__(self) -> PairHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its forks are of its session
        self._process.kill()
        self._process.join()
        self._pipe.close()


def serve_pairs(kind: str, folder: Path, pipe: Connection) -> None:
    """In the host."""
    os.setsid()
    import torch

    from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks

    choose_code_paths(4, gpu=kind == "gpu")
    torch.set_num_threads(1)
    import_before_forks()

    import pair_models
    from pair_ranks import serve, train
    from support.world import run_world

    folders = {name: folder / name for name in pair_models.MODELS}
    specs = {name: pair_models.write(name, path) for name, path in folders.items()}
    while True:
        pair, spoiled = pipe.recv()
        try:
            trainers, engines = run_world(
                pair.trainers,
                pair.tp,
                train,
                serve,
                pair,
                specs[pair.model],
                str(folders[pair.model]),
                spoiled,
                deadline_s=PAIR_S,
                context=multiprocessing.get_context("fork"),
                engines_apart=True,
            )
            found: dict[str, Any] = {"trainers": trainers, "engines": engines}
        except Exception:
            found = {"failed": traceback.format_exc()}
        pipe.send(found)
