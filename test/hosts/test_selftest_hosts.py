"""The self-test under torchrun on two hosts: trainer ranks on one, a real SGLang server on the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_reshard.selftest.children import free_port
from support.hosts import Host, laboratory, why_not
from support.places import paths

pytestmark = [pytest.mark.engine, pytest.mark.skipif(bool(why_not()), reason=why_not())]
_DEADLINE_S = 600


def test_a_server_on_another_host_says_what_transformers_says(tmp_path: Path) -> None:
    port = str(free_port())
    with laboratory(2) as hosts:
        ended = [start(host, number, hosts[0].address, port, tmp_path) for number, host in enumerate(hosts)]
        codes = [process.wait(_DEADLINE_S) for process in ended]
    logs = [(tmp_path / f"{number}.err").read_text() for number in range(2)]
    assert codes == [0, 0], "\n".join(logs)
    said = json.loads((tmp_path / "0.out").read_text().splitlines()[-1])
    steps = {row["step"]: row for row in said["rows"]}
    assert said["ok"]
    assert steps["log-probabilities, as transformers has them"]["right"]
    assert steps["limit: a plain transfer of torch between the hosts"]["seconds"] > 0
    assert steps["warm update, auto"]["route"] == "p2p"
    assert steps["warm update, auto"]["limit"] > 0


def start(host: Host, number: int, address: str, port: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
               f"--node-rank={number}", f"--master-addr={address}", f"--master-port={port}",
               "-m", "sglang_reshard.selftest", "--target", "tp=1"]  # fmt: skip
    # The hosts resolve their own names to loopback, where gloo would listen.
    variables = paths({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"})
    with (folder / f"{number}.out").open("w") as out, (folder / f"{number}.err").open("w") as log:
        return host.run(command, env=variables, stdout=out, stderr=log)
