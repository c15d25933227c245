"""Servers and trainers that tests start on hosts, with a log of each process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from sglang_reshard.selftest.digests import LOADER
from sglang_reshard.testing import cpu_host
from support.hosts import Host, environment
from support.nixl_env import FOLDER as NIXL_FOLDER

TEST = Path(__file__).parents[1]
_SERVER_PORT, _INIT_PORT, _RENDEZVOUS_PORT = 30000, 25000, 29500


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

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in self._logs.values())

    def await_health(self, host: Host, url: str, servers: list[subprocess.Popen[str]], deadline: float) -> None:
        # WeightsMissing: of servers that start on dummy weights.
        probe = (
            f"import httpx, sys; health = httpx.get('{url}/health', timeout=5); "
            "sys.exit(health.status_code != 200 and 'WeightsMissing' not in health.text)"
        )
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
        command += ["--dist-init-addr", f"{hosts[0].address}:{_INIT_PORT}", "--host", host.address]
        command += ["--port", str(_SERVER_PORT), "--load-format", "dummy", "--dtype", "float32"]
        command += ["--skip-server-warmup", "--skip-tokenizer-init", "--custom-weight-loader", LOADER]
        command += cpu_host.command_line()
        variables = {**cpu_host.environment(tp_size), "SGLANG_RESHARD_PEERS": "10.0.0.0/8"}  # of the laboratory
        found.append(places.start(host, "server", command, paths(variables)))
    return found


def url_of(host: Host) -> str:
    return f"http://{host.address}:{_SERVER_PORT}"


def trainers_on(places: Places, hosts: list[Host], per_host: int, *arguments: str) -> list[subprocess.Popen[str]]:
    found = []
    for rank, host in enumerate(hosts):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--node-rank={rank}"]
        command += [f"--nproc-per-node={per_host}", f"--master-addr={hosts[0].address}"]
        command += [f"--master-port={_RENDEZVOUS_PORT}", str(TEST / "hosts" / "engine_job.py"), *arguments]
        found.append(places.start(host, "trainer", command, paths({"OMP_NUM_THREADS": "1"})))
    return found


def paths(variables: Mapping[str, str]) -> Mapping[str, str]:
    path = [str(TEST), str(TEST.parent), str(NIXL_FOLDER), variables.get("PYTHONPATH", "")]
    return environment(**{**variables, "PYTHONPATH": ":".join(filter(None, path))})
