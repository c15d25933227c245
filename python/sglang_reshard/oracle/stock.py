"""The digests that every engine rank would have after stock `load_weights`, with no engine started.

A fresh process imports SGLang once and forks a child for each rank; each child builds its rank's model
and loads one checkpoint after the other, as an engine that is updated would.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_reshard import cpu_host
from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.oracle.digests import digests
from sglang_reshard.oracle.forks import ChildFailed, in_forks
from sglang_reshard.oracle.rank import build_rank, import_before_forks


def stock_digests(
    model_path: str | Path,
    checkpoints: Sequence[str | Path],
    *,
    tp_size: int,
    dtype: str = "bfloat16",
    ranks: Sequence[int] | None = None,
    ep_size: int = 1,
    processes: int = 2,
    on_rank: Callable[[int], None] | None = None,
    deadline_seconds: float = 600,
    **server_args: Any,
) -> list[dict[int, dict[str, str]]]:
    """For each checkpoint (a folder of safetensors): engine rank -> path of a live tensor -> digest.

    `on_rank` is called with each rank that is done. On a host without a GPU it runs as the CPU engine
    does, so that digests of a live one compare.
    """
    ranks = list(range(tp_size)) if ranks is None else list(ranks)
    job = {
        "model_path": str(model_path),
        "checkpoints": [str(c) for c in checkpoints],
        "ranks": ranks,
        "processes": processes,
        "deadline_seconds": deadline_seconds,
        "build": {"tp_size": tp_size, "ep_size": ep_size, "dtype": dtype, **server_args},
    }
    found: dict[int, list[dict[str, str]]] = {}
    for rank, of_checkpoints in _answers(job, _environment(tp_size), deadline_seconds):
        found[rank] = of_checkpoints
        if on_rank is not None:
            on_rank(rank)
    return [{rank: found[rank][i] for rank in ranks} for i in range(len(checkpoints))]


def _environment(tp_size: int) -> dict[str, str]:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or not torch.cuda.is_available():
        return {**os.environ, **cpu_host.environment(tp_size)}
    return dict(os.environ)


def _answers(
    job: dict[str, Any], environment: dict[str, str], deadline_seconds: float
) -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Run the job in a fresh process, which prints one line of JSON a rank."""
    # Files, not pipes, for what goes in and for errors: neither side can then block the other.
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as order:
        json.dump(job, order)
        order.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-c", "from sglang_reshard.oracle import stock; stock.serve()"],
            stdin=order,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None

        def end() -> None:
            # With the children that it forked, which are of its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        # The children have a deadline of their own; this one is for the imports before them.
        watch = threading.Timer(deadline_seconds + _GRACE_SECONDS, end)
        watch.start()
        try:
            for line in process.stdout:
                # SGLang prints to stdout as well.
                if line.startswith(_ANSWER):
                    rank, of_checkpoints = json.loads(line.removeprefix(_ANSWER))
                    yield rank, of_checkpoints
            code = process.wait()
        finally:
            watch.cancel()
            end()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        if code == _TOO_LATE:
            raise DeadlineExceeded(f"Stock loading of {job['model_path']}: {errors.read()[-500:]}")
        if code:
            raise ChildFailed(f"Stock loading of {job['model_path']} failed:\n{errors.read()[-8000:]}")


# ---- in the fresh process

_ANSWER = "stock digests: "
_TOO_LATE = 3
_GRACE_SECONDS = 120


def _weights(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"There are no safetensors in {folder}.")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, opened.get_tensor(name)


def _serve(job: dict[str, Any]) -> None:
    import_before_forks()

    def load(rank: int) -> list[dict[str, str]]:
        model = build_rank(job["model_path"], tp_rank=rank, **job["build"])
        found = []
        for folder in job["checkpoints"]:
            with torch.no_grad():
                model.load_weights(_weights(folder))  # type: ignore[operator]
            found.append(digests(model))
        return found

    answers = in_forks(load, job["ranks"], processes=job["processes"], deadline_seconds=job["deadline_seconds"])
    for rank, found in answers:
        print(_ANSWER + json.dumps([rank, found]), flush=True)


def serve() -> None:
    try:
        _serve(json.load(sys.stdin))
    except DeadlineExceeded as error:
        print(error, file=sys.stderr)
        sys.exit(_TOO_LATE)
