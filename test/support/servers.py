"""Real SGLang servers in processes of their own, of which nothing is left afterwards."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sglang_reshard.selftest import children, engines
from sglang_reshard.testing import cpu_host


def launch(model: Path, tp: int, *options: str, program: Sequence[str] = ("-m", "sglang.launch_server")) -> list[str]:
    """The command of a server on dummy float32 weights, on a host without a GPU; `program` is Python's to run."""
    return [sys.executable, *program, "--model-path", str(model), "--tp-size", str(tp), "--load-format", "dummy",
            "--dtype", "float32", "--skip-server-warmup", *cpu_host.command_line(), *options]  # fmt: skip


@contextlib.contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[str]:
    """The URL of the server that the command starts, once it is healthy; `--port` is added to the command."""
    port = children.free_port()
    url = f"http://127.0.0.1:{port}"
    with children.started([*command, "--port", str(port)], {**os.environ, **environment}, log) as server:
        try:
            engines.await_health(url, server, log)
            yield url
        finally:
            server.census()
            server.processes[0].kill()  # one that is asked to end takes some seconds
