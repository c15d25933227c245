"""A real SGLang server of two ranks, and faults in the middle of an update of it.

Its processes are held there by a plugin of this folder; see sglang_gate/faults_gate.py. `make test` stops one; the
self-test, which it runs, kills a trainer rank and a scheduler at any point.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_reshard.patches.shared_segments import remove
from sglang_reshard.selftest import tiny_model
from sglang_reshard.selftest.children import free_port
from sglang_reshard.testing import cpu_host
from support import zygote
from support.left_behind import Belongings, Watch
from support.orchestra import Orchestra
from support.player import Hang
from support.scenes import DETECT_S, message_names, wait_until
from support.servers import launch

pytestmark = [pytest.mark.engine]
TP, DEADLINE_S = 2, 8.0
GATE = Path(__file__).parent / "sglang_gate"
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


class Serving:
    """A server and its trainer. The server is started again when it has ended, at the same URL."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.orchestra = Orchestra(folder, trainers=TP, engines=0, url=self.url)
        self._process: subprocess.Popen[bytes] | None = None
        self.watch = Watch()
        self._family: list[psutil.Process] = []
        tiny_model.save(folder / "model", TP, TP)

    def start(self) -> None:
        """A server, unless it serves."""
        if self._process is not None and self._process.poll() is None:
            return
        self.end_server()
        command = launch(self.folder / "model", TP, "--port", str(self.port))
        variables = {**os.environ, **cpu_host.environment(TP), "SGLANG_RESHARD_FAULTS_GATE": str(self.folder)}
        variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(GATE)])
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        wait_until(self._healthy, 200, f"the server to come up; see {self.folder / 'log'}")
        self._family = _family(self._process.pid)
        self.watch.look(p.pid for p in self._family)

    def trainer(self, timeout_s: float) -> None:
        self.orchestra.start_trainers(timeout_s)
        self.watch.look(p.pid for p in self.orchestra.trainers)

    def update(self, version: int) -> None:
        """Exact, as every element's digest says."""
        self.orchestra.update(version, "ipc", verify="full")
        self.orchestra.until_ended(60)
        failed = [ended for ended in self.orchestra.failures().values() if ended.kind]
        assert not failed, failed

    def hold(self, rank: int, version: int) -> int:
        """Begin an update, until an engine rank has made half of its copies. Its process id."""
        at = self.folder / f"at-{rank}"
        at.unlink(missing_ok=True)
        (self.folder / f"hold-{rank}").touch()
        self.orchestra.update(version, "ipc", bucket_bytes=1 << 20)
        wait_until(at.exists, 60, f"engine rank {rank} to come to `move`")
        return int(at.read_text())

    def let_go(self, rank: int) -> None:
        (self.folder / f"hold-{rank}").unlink(missing_ok=True)

    def ask(self) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json={"input_ids": [5, 6, 7], "sampling_params": GREEDY}, timeout=30)

    def tokens(self) -> list[int]:
        return self.ask().raise_for_status().json()["output_ids"]

    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def end_server(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            self._family = _family(process.pid)
        self.watch.look(p.pid for p in self._family)
        for member in self._family:  # psutil does not mistake another process of the same number for it
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        remove(self.watch.segments)  # SGLang's own, which it leaves when it is killed

    def end(self) -> None:
        for rank in range(TP):
            self.let_go(rank)
        self.orchestra.end()
        self.end_server()

    def _healthy(self) -> bool:
        if self.ended():
            pytest.fail(f"the server ended:\n{(self.folder / 'log').read_text()[-6000:]}")
        with contextlib.suppress(httpx.TransportError):
            health = httpx.get(f"{self.url}/health", timeout=5)
            return health.status_code == 200 or "WeightsMissing" in health.text
        return False


def _family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    forkserver.ensure_running()
    with zygote.forks("cpu"):
        before = Belongings.of_this_process()
        serving = Serving(tmp_path_factory.mktemp("serving"))
        try:
            yield serving
        finally:
            serving.end()
    assert serving.watch.left_since(before) == []


def test_a_stopped_scheduler_is_not_waited_for_and_goes_on(serving: Serving, case) -> None:
    with case("scheduler 1 stopped", "move", "ipc, SGLang") as row:
        serving.start()
        serving.trainer(DEADLINE_S)
        serving.update(1)
        before = serving.tokens()
        pid = serving.hold(1, 2)
        os.kill(pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        serving.let_go(1)
        try:
            row.detect_s = _noticed(serving, stopped_at)
            assert row.detect_s < 2 * DEADLINE_S + 30
            assert serving.ask().status_code == 503
        finally:
            os.kill(pid, signal.SIGCONT)
        for ended in serving.orchestra.failures().values():
            assert ended.kind == "TornWeights"
            assert "engine ranks [1]" in ended.message
        serving.update(1)
        assert serving.tokens() == before
        row.outcome = "torn: HTTP 503; the next update made it good"


@pytest.mark.sweep
def test_a_trainer_killed_in_the_middle_of_a_move(serving: Serving, case) -> None:
    with case("trainer rank 1 killed", "move", "ipc, SGLang") as row:
        serving.start()
        serving.trainer(300)
        serving.update(1)
        before = serving.tokens()
        serving.hold(0, 2)
        victim = serving.orchestra.trainers[1]
        killed_at = serving.orchestra.kill(victim)
        serving.let_go(0)
        row.detect_s = _noticed(serving, killed_at)
        assert row.detect_s < DETECT_S
        (ended,) = serving.orchestra.failures().values()
        assert message_names(ended.message, victim)
        refused = serving.ask()
        assert refused.status_code == 503
        assert message_names(refused.text, victim)
        serving.trainer(300)
        serving.update(1)
        assert serving.tokens() == before
        row.outcome = "torn: HTTP 503; a new trainer made it good"


@pytest.mark.sweep
def test_a_scheduler_killed_in_the_middle_of_a_move(serving: Serving, case) -> None:
    with case("scheduler 1 killed", "move", "ipc, SGLang") as row:
        serving.start()
        serving.trainer(300)
        serving.update(1)
        before, senders = serving.tokens(), [p.pid for p in serving.orchestra.trainers]
        pid = serving.hold(1, 2)
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        row.detect_s = _noticed(serving, killed_at)
        assert row.detect_s < DETECT_S
        for ended in serving.orchestra.failures().values():
            assert ended.kind
            # What is reported first: that the rank disconnected, or that the server has ended because of that.
            assert f"process {pid}) disconnected" in ended.message or "did not answer" in ended.message
        serving.let_go(1)
        wait_until(serving.ended, 60, "the server to end, as SGLang's do when they lose a scheduler")
        serving.start()
        serving.update(1)
        assert [p.pid for p in serving.orchestra.trainers] == senders
        assert serving.tokens() == before
        row.outcome = "the server ended; the same trainer updated the next"


def _noticed(serving: Serving, since: float) -> float:
    """Seconds until the last trainer rank that lives has raised."""
    try:
        serving.orchestra.until_ended(60)
    except Hang:
        raise Hang(f"trainer ranks waited on; see {serving.folder / 'log'}") from None
    return max(ended.at for ended in serving.orchestra.failures().values()) - since
