"""Trainers over two hosts that update a stock SGLang server over two others, with no variable set for the network.

The digest of every live tensor is that of a stock load of the trainer's checkpoint, tokens are transformers'.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oracle.digests import LOADER
from oracle.stock import stock_digests
from sglang_reshard.testing import cpu_host
from support.hosts import Host, environment, laboratory, why_not
from support.nixl_env import FOLDER as NIXL_FOLDER
from support.nixl_env import needs_nixl
from support.tiny_qwen3 import tiny_qwen3

pytestmark = [
    pytest.mark.engine,
    pytest.mark.sweep,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(900),
]
TEST = Path(__file__).parents[1]
CONFIG = tiny_qwen3()
SERVER_PORT, INIT_PORT, RENDEZVOUS_PORT = 30000, 25000, 29500
_DEADLINE_S = 400


class Places:
    """Processes on hosts, with a log each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[int, Path] = {}

    def start(self, host: Host, name: str, command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
        log = self._folder / f"{name}-{host.name}.log"
        with log.open("w") as out:
            process = host.run(command, env=variables, stdout=out, stderr=out)
        self._logs[process.pid] = log
        return process

    def await_end(self, processes: list[subprocess.Popen[str]], deadline: float) -> None:
        for process in processes:
            code = process.wait(max(1, deadline - time.monotonic()))
            assert code == 0, self._logs[process.pid].read_text()[-6000:]

    def await_health(self, host: Host, url: str, servers: list[subprocess.Popen[str]], deadline: float) -> None:
        probe = f"import httpx, sys; sys.exit(httpx.get('{url}/health', timeout=5).status_code != 200)"
        command = host.command([sys.executable, "-c", probe])
        while subprocess.run(command, capture_output=True, check=False).returncode:
            for server in servers:
                assert server.poll() is None, self._logs[server.pid].read_text()[-6000:]
            assert time.monotonic() < deadline, self._logs[servers[0].pid].read_text()[-6000:]
            time.sleep(1)


def servers_on(places: Places, hosts: list[Host], folder: Path, tp_size: int) -> list[subprocess.Popen[str]]:
    """One server over these hosts; the first one's address is its URL's."""
    found = []
    for rank, host in enumerate(hosts):
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "model")]
        command += ["--tp-size", str(tp_size), "--nnodes", str(len(hosts)), "--node-rank", str(rank)]
        command += ["--dist-init-addr", f"{hosts[0].address}:{INIT_PORT}", "--host", host.address]
        command += ["--port", str(SERVER_PORT), "--load-format", "dummy", "--dtype", "float32"]
        command += ["--skip-server-warmup", "--skip-tokenizer-init", "--custom-weight-loader", LOADER]
        command += cpu_host.command_line()
        found.append(places.start(host, "server", command, paths(cpu_host.environment(tp_size))))
    return found


def trainers_on(places: Places, hosts: list[Host], per_host: int, *arguments: str) -> list[subprocess.Popen[str]]:
    found = []
    for rank, host in enumerate(hosts):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--node-rank={rank}"]
        command += [f"--nproc-per-node={per_host}", f"--master-addr={hosts[0].address}"]
        command += [f"--master-port={RENDEZVOUS_PORT}", str(Path(__file__).with_name("engine_job.py")), *arguments]
        found.append(places.start(host, "trainer", command, paths({"OMP_NUM_THREADS": "1"})))
    return found


def paths(variables: Mapping[str, str]) -> Mapping[str, str]:
    path = [str(TEST), str(TEST.parent), str(NIXL_FOLDER), variables.get("PYTHONPATH", "")]
    return environment(**{**variables, "PYTHONPATH": ":".join(filter(None, path))})


@pytest.mark.parametrize(
    ("trainer_hosts", "per_host", "engine_hosts", "tp_size", "asked", "transport"),
    [
        ("ab", 2, "cd", 4, "auto", "p2p"),
        ("ab", 1, "bc", 2, "auto", "ipc+p2p"),
        pytest.param("ab", 2, "cd", 4, "nixl", "nixl", marks=needs_nixl),
    ],
    ids=["apart", "one host has both", "apart, read by NIXL"],
)
def test_a_server_over_two_hosts_follows_trainers_over_two(
    trainer_hosts: str, per_host: int, engine_hosts: str, tp_size: int, asked: str, transport: str, tmp_path: Path
) -> None:
    CONFIG.save_pretrained(tmp_path / "model")
    deadline = time.monotonic() + _DEADLINE_S
    places = Places(tmp_path)
    with laboratory(len({*trainer_hosts, *engine_hosts}), names_lead_to_loopback=False) as hosts:
        by_letter = dict(zip("abcd", hosts, strict=False))
        engine = [by_letter[letter] for letter in engine_hosts]
        servers = servers_on(places, engine, tmp_path, tp_size)
        url = f"http://{engine[0].address}:{SERVER_PORT}"
        places.await_health(hosts[0], url, servers, deadline)
        trainers = [by_letter[letter] for letter in trainer_hosts]
        places.await_end(trainers_on(places, trainers, per_host, str(tmp_path), str(tp_size), url, asked), deadline)
    seen = assert_arrived(tmp_path, transport)
    checkpoints = [tmp_path / version for version in ("1", "2")]
    expected = stock_digests(checkpoints[0], checkpoints, tp_size=tp_size, dtype="float32")
    assert [dict(enumerate(version["digests"])) for version in seen] == expected


def test_an_engine_that_the_trainer_starts_on_all_its_hosts_follows_it(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path / "model")
    deadline = time.monotonic() + _DEADLINE_S
    places = Places(tmp_path)
    with laboratory(2, names_lead_to_loopback=False) as hosts:
        places.await_end(trainers_on(places, hosts, 2, str(tmp_path), "2", "embedded", "auto"), deadline)
    assert_arrived(tmp_path, "ipc+p2p")


def assert_arrived(folder: Path, transport: str) -> list[dict[str, Any]]:
    """Everything that the trainer has seen of two updates; by which way they went."""
    seen = json.loads((folder / "seen.json").read_text())
    assert [version["tokens"] for version in seen] == [version["expected"] for version in seen]
    assert seen[0]["tokens"] != seen[1]["tokens"]
    for version in seen:
        report = version["report"]
        assert report["transport"] == transport
        for rank in report["engine_ranks"]:
            read_with_gaps = transport == "nixl" and rank["received_bytes"] > rank["least_bytes"]
            assert rank["received_bytes"] == rank["least_bytes"] > 0 or read_with_gaps
    return seen
