"""A stock `sglang.launch_server` with the package installed: updated by a trainer that knows its URL only."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_reshard import __version__, cpu_host
from sglang_reshard.demo import tiny_model
from sglang_reshard.shared_segments import remove, segments_of
from support.trainers import run_trainers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]
TP, KEY = 2, "the admin's key"


def free_port() -> int:
    """One that leaves room: the server takes more ports, up to 10,000 above its own."""
    while True:
        port = random.randrange(20_000, 50_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a TP=2 server on dummy weights, which asks for an admin key."""
    folder = tmp_path_factory.mktemp("server")
    tiny_model.save(folder / "model", TP, TP)
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "model"), "--tp-size",
               str(TP), "--port", str(port), "--load-format", "dummy", "--dtype", "float32", "--admin-api-key", KEY,
               "--skip-server-warmup"]  # fmt: skip
    for name, value in cpu_host.engine_arguments().items():
        command += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        command,
        env={**os.environ, **cpu_host.environment(TP)},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(url, process, folder / "log")
        yield url
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        segments = segments_of(p.pid for p in family)
        for p in family:
            p.kill()
        process.wait()
        remove(segments)
        log.close()


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 180
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"the server did not come up:\n{log.read_text()[-6000:]}")


def test_a_trainer_updates_a_server_by_url(server: str, tmp_path: Path) -> None:
    ranks = run_trainers(2, "server_job:update_a_server", tmp_path, url=server, key=KEY, target_tp=TP)
    seen = ranks[0]
    assert seen["before"] != seen["expected"]
    assert seen["after"] == seen["expected"]
    assert all(rank["report"] == seen["report"] for rank in ranks)
    assert seen["paused"]["success"]
    assert seen["after_pause"] == seen["expected"]
    info = httpx.get(f"{server}/server_info", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert info["weight_version"] == "while paused"
    assert {state["reshard_version"] for state in info["internal_states"]} == {__version__}


def test_old_weights_serve_while_new_ones_are_staged(server: str, tmp_path: Path) -> None:
    seen = run_trainers(2, "server_job:stage", tmp_path, url=server, key=KEY, target_tp=TP)[0]
    plain, staged = seen["plain"], seen["staged"]
    assert plain["meanwhile"] == []
    assert len(staged["meanwhile"]) > 5
    assert set(staged["meanwhile"]) == {"plain"}, "the version before"
    assert staged["afterwards"][-1] == "staged"
    assert staged["report"]["verified"] == "full"
    assert all(rank["staged_bytes"] > 0 for rank in staged["report"]["engine_ranks"])


def test_a_stranger_is_turned_away(server: str) -> None:
    assert httpx.post(f"{server}/update_weights_distributed", content=b"{}").status_code == 401


def test_a_malformed_request_is_answered_not_served(server: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for body in (b"", b"{}", b'{"session": 3}', b"\x80\x04pickle"):
        answer = httpx.post(f"{server}/update_weights_distributed", content=body, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        assert "malformed request" in answer.json()["message"]
    assert httpx.get(f"{server}/health").status_code == 200
