"""Trainer and engine on different hosts, which reach each other by one network, and have no variable set for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmark.hosts.job import Job
from support.hosts import Host, laboratory, why_not
from support.nixl_env import needs_nixl
from support.places import paths

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not())]
_DEADLINE_S = 400


def start(
    host: Host,
    role: str,
    folder: Path,
    address: str = "",
    rank: int = 0,
    size: int = 1,
    transport: str = "auto",
    **variables: str,
) -> subprocess.Popen[str]:
    sizes = {"trainers": size, "updates": 1, "tensors": 8, "side": 65}
    job = msgspec.json.encode(Job(str(folder), address, transport, rank=rank, **sizes)).decode()
    command = [sys.executable, "-m", "benchmark.hosts.job", role, job]
    with (folder / f"{role}-{rank}.log").open("w") as log:
        return host.run(command, env=paths({"OMP_NUM_THREADS": "1", **variables}), stdout=log, stderr=log)


@pytest.mark.parametrize(("asked", "transport"), [("auto", "p2p"), pytest.param("nixl", "nixl", marks=needs_nixl)])
def test_a_module_on_another_host_has_the_trainers_weights(asked: str, transport: str, tmp_path: Path) -> None:
    """All hosts resolve their own names to loopback, which gloo would listen on."""
    with laboratory(2) as (a, b):
        processes = {f"train-{rank}": start(a, "train", tmp_path, a.address, rank, 2, asked) for rank in range(2)}
        processes["receive-0"] = start(b, "receive", tmp_path)
        for name, process in processes.items():
            assert process.wait(_DEADLINE_S) == 0, (tmp_path / f"{name}.log").read_text()
    assert (tmp_path / "exact-0").read_text() == "True"
    assert json.loads((tmp_path / "timed").read_text())["transports"] == [transport]


def test_an_interface_that_leads_nowhere_is_named_at_both_ends(tmp_path: Path) -> None:
    with laboratory(2) as (a, b):
        trainer = start(a, "train", tmp_path, a.address, GLOO_SOCKET_IFNAME="lo")
        receiver = start(b, "receive", tmp_path, GLOO_SOCKET_IFNAME="lo")
        assert trainer.wait(_DEADLINE_S) == 1
        receiver.kill()
        receiver.wait()
    said = (tmp_path / "train-0.log").read_text()
    assert "trainer rank 0 is at interface lo of host-a, engine rank 0 is at interface lo of host-b" in said
    assert "set GLOO_SOCKET_IFNAME on the hosts to another interface" in said
