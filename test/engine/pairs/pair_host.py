"""A process that has imported SGLang once and forks the ranks of one pair after another.

SGLang chooses between GPU and CPU code paths when it is imported, and a process can be one rank of one engine
only; so each kind of code path has a host of its own, and each rank is a fork of it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from pairs import Pair
from support import zygote

ANSWER = "pair: "
PAIR_S = 450.0  # for one pair on a busy machine
START_S = 400.0  # for the imports before the first
TEST = Path(__file__).parents[2]


class PairHost:
    """The test's end of it. `run` a pair; the process and its forks are gone when the `with` ends."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(TEST), str(TEST.parent)]),
                "OMP_NUM_THREADS": "1",
                zygote.VARIABLE: kind,
            },
            start_new_session=True,
        )

    def run(self, pair: Pair, *, spoiled: bool = False) -> dict[str, Any]:
        """What the ranks of a pair returned: {"trainers": [...], "engines": [...]}."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([msgspec.to_builtins(pair), spoiled]) + "\n")
        self._process.stdin.flush()
        # The host keeps the pair's deadline itself; this is for a host that hangs.
        watch = threading.Timer(PAIR_S + START_S, self._kill)
        watch.start()
        try:
            for line in self._process.stdout:
                if line.startswith(ANSWER):  # SGLang prints to stdout as well
                    found = json.loads(line.removeprefix(ANSWER))
                    assert "failed" not in found, found["failed"]
                    return found
        finally:
            watch.cancel()
        self._errors.seek(0)
        raise AssertionError(f"the host of pairs ended:\n{self._errors.read()[-8000:]}")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its forks are of its session

    def __enter__(self) -> PairHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def main(kind: str, folder: str) -> None:
    import torch

    from sglang_reshard.cli.plan.sglang_model import choose_code_paths, import_before_forks

    choose_code_paths(4, gpu=kind == "gpu")
    torch.set_num_threads(1)
    import_before_forks()

    import pair_models
    from pair_ranks import serve, train
    from support.world import run_world

    folders = {name: Path(folder) / name for name in pair_models.MODELS}
    specs = {name: pair_models.write(name, path) for name, path in folders.items()}
    for line in sys.stdin:
        order, spoiled = json.loads(line)
        pair = msgspec.convert(order, Pair)
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
        print(ANSWER + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
