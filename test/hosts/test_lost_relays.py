"""An engine's host is lost while others read from it, or the way to it: all others have the weights all the same."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from benchmark.hosts.job import Job, sent_by_link
from support.hosts import Host, laboratory, why_not
from support.nixl_env import needs_nixl
from support.places import paths
from support.sweep import sweep

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), needs_nixl]
RECEIVERS = 3
_START_S, _ENDS_S = 300.0, 300.0


def sent_by(host: Host) -> int:
    command = host.command(["cat", "/proc/net/dev"])
    return sent_by_link(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.parametrize("how", ["killed", sweep("unplugged"), sweep("parted")])
def test_others_have_the_weights_at_the_end_of_the_update(how: str, tmp_path: Path) -> None:
    """84 MB on links that carry 25 MB/s, at the default deadline of 300 s."""
    with laboratory(1 + RECEIVERS, rate="200mbit", names_lead_to_loopback=False) as hosts:
        processes = []
        for number, host in enumerate(hosts):
            rank = max(0, number - 1)
            sizes = {"receivers": RECEIVERS, "updates": 0, "tensors": 40}
            job = Job(str(tmp_path), hosts[0].address, "nixl", relay=True, on_failure="exclude", rank=rank, **sizes)
            role = "receive" if number else "train"
            command = [sys.executable, "-m", "benchmark.hosts.job", role, msgspec.json.encode(job).decode()]
            variables = paths({"OMP_NUM_THREADS": "1"})
            with (tmp_path / f"{role}-{rank}.log").open("w") as log:
                processes.append(host.run(command, env=variables, stdout=log, stderr=log))
        train, *receive = processes
        end = time.monotonic() + _START_S
        while sent_by(hosts[0]) < 25 << 20:
            assert time.monotonic() < end
            assert train.poll() is None, (tmp_path / "train-0.log").read_text()
            time.sleep(0.1)
        if how == "killed":
            hosts[1].run(["kill", "-9", "-1"]).wait()
        elif how == "unplugged":
            hosts[1].set_link(up=False)
        else:
            hosts[1].cut_off(hosts[2])
        for process in (train, *receive[how != "parted" :]):
            process.wait(_ENDS_S)
        logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
        assert train.returncode == 0, logs["train-0.log"]
        assert ("was not updated and is excluded from further updates" in logs["train-0.log"]) == (how != "parted")
        for rank in (1, 2) if how != "parted" else (0, 1, 2):
            if rank < 2 or how != "parted":
                assert "it reads the remaining weights from the trainer" in logs[f"receive-{rank}.log"]
            assert (tmp_path / f"exact-{rank}").read_text() == "True"
