"""A real SGLang server with this package installed, on dummy weights until its first update."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from benchmark.demo import children, tiny_model
from benchmark.soak.expected import DTYPE
from benchmark.soak.weights import ENGINE_TP
from benchmark.world import free_port
from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.patches.stock_weights import SERVE_DUMMY
from sglang_reshard.testing import cpu_host
from tools.oracle.digests import LOADER

_START_S = 300.0
_POLL_S = 0.5


class Server:
    """Use as a context: it serves from its begin to its end, and nothing of it is left afterwards.

    deadline: a time.monotonic() after which it is ended in any case.
    """

    def __init__(self, model: Path, environment: Mapping[str, str], log: Path, deadline: float) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = log
        self._stop = threading.Event()
        self._error: ReshardError | None = None
        served = {**environment, SERVE_DUMMY: "1"}  # clients ask before the first update, too
        self._thread = threading.Thread(
            target=self._serve, args=(_command(model, self._port), served, deadline), name="server"
        )

    def __enter__(self) -> Server:
        self._thread.start()
        try:
            self._await_health()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return next(p.pid for p in psutil.Process().children() if str(self._port) in p.cmdline())

    def check(self) -> None:
        """Raise when the server has ended although nobody told it to."""
        if self._error is not None:
            raise self._error

    def _await_health(self) -> None:
        end = time.monotonic() + _START_S
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while time.monotonic() < end:
                self.check()
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").status_code == httpx.codes.OK:
                        return
                time.sleep(_POLL_S)
        raise DeadlineExceeded(f"the server was not healthy after {_START_S:.0f} s.\n{children.tail(self._log)}")

    def _serve(self, command: list[str], environment: dict[str, str], deadline: float) -> None:
        try:
            children.run(command, environment, self._log, deadline, self._look)
        except _Stopped:
            return
        except ReshardError as error:
            self._error = error
        else:
            self._error = ReshardError(f"the server ended by itself.\n{children.tail(self._log)}")

    def _look(self) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _end(self) -> None:
        self._stop.set()
        self._thread.join()


class _Stopped(Exception):
    """It was told to end, which is no error."""


def _command(model: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--tp-size", str(ENGINE_TP),
            "--port", str(port), "--load-format", "dummy", "--dtype", DTYPE, "--skip-server-warmup",
            "--context-length", str(tiny_model.CONTEXT_LENGTH), "--custom-weight-loader", LOADER,
            "--log-level", "warning", *cpu_host.command_line()]  # fmt: skip
