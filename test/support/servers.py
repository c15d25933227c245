"""Real SGLang servers in processes of their own, of which nothing is left afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from sglang_reshard.patches.shared_segments import remove, segments_of
from sglang_reshard.testing import cpu_host

_START_S = 600
_END_S = 120


def free_port() -> int:
    """Returns a port for a server, which may take others up to 10,000 above it.

    Where the kernel's range for clients' connections leaves room below it, no connection takes the port meanwhile.
    """
    first_of_clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    end = first_of_clients - 10_000 if first_of_clients > 21_000 else 50_000
    while True:
        port = random.randrange(10_000, end)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def launch(model: Path, tp: int, *options: str, program: Sequence[str] = ("-m", "sglang.launch_server")) -> list[str]:
    """The command of a server on dummy float32 weights, on a host without a GPU; `program` is Python's to run."""
    return [sys.executable, *program, "--model-path", str(model), "--tp-size", str(tp), "--load-format", "dummy",
            "--dtype", "float32", "--skip-server-warmup", *cpu_host.command_line(), *options]  # fmt: skip


@contextlib.contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[str]:
    """The URL of the server that the command starts, once it is healthy; `--port` is added to the command."""
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _await_health(url, process, log)
            yield url
        finally:
            _end(process)


def is_up(health: httpx.Response) -> bool:
    """Returns whether a server that answers so has started. One that started on dummy weights waits for others."""
    return health.status_code == 200 or "WeightsMissing" in health.text


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if is_up(httpx.get(f"{url}/health", timeout=5)):
                return
        time.sleep(0.5)
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-6000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a server, all but Python's resource tracker, which removes what it and its schedulers leave."""
    tracker, segments = set(), set()
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        segments = segments_of(p.pid for p in family)
        tracker = {p for p in family if _is_tracker(p)}
        for p in set(family) - tracker:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
    process.wait()
    assert psutil.wait_procs(tracker, timeout=_END_S)[1] == []
    remove(segments)


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "resource_tracker" in " ".join(process.cmdline())
    return False
