"""A host vanishes without a word, as its cable is pulled: all that are in an update with it hear of it within 10 s."""

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

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not())]
JOB = Path(__file__).with_name("control_job.py")
NOTICED_S = 10.0
ENDS_S = 10.0  # for processes that have heard of it to end
_START_S = 300.0


def start(host: Host, role: str, folder: Path, address: str) -> subprocess.Popen[str]:
    with (folder / f"{role}.log").open("w") as log:
        command = [sys.executable, JOB, role, folder, address]
        return host.run(command, env=paths({}), stdout=log, stderr=log)


def until(path: Path, seconds: float) -> str:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name} within {seconds:g} s"
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.parametrize("lost", [sweep("join"), "talk", sweep("serve")])
def test_a_host_whose_link_is_down_is_noticed_by_all(lost: str, tmp_path: Path) -> None:
    """One client is idle, the other sends all the time: its bytes are not acknowledged."""
    with laboratory(3) as hosts:
        placed = dict(zip(("serve", "join", "talk"), hosts, strict=True))
        for role, host in placed.items():
            start(host, role, tmp_path, hosts[0].address)
        for role in placed:
            until(tmp_path / f"ready-{role}", _START_S)
        time.sleep(1)
        placed[lost].set_link(up=False)
        cut_at = time.monotonic()
        for role in placed.keys() - ({"serve"} if lost == "serve" else set()):
            at, _, reason = until(tmp_path / f"heard-{role}", 2 * NOTICED_S).partition(" ")
            assert float(at) - cut_at < NOTICED_S, f"{role} heard after {float(at) - cut_at:.1f} s: {reason}"
            if role != lost and lost != "serve":
                assert lost in reason


@pytest.mark.parametrize("transport", ["p2p", pytest.param("nixl", marks=[needs_nixl, pytest.mark.sweep])])
def test_an_update_ends_when_the_receivers_host_is_lost_in_its_middle(transport: str, tmp_path: Path) -> None:
    """At the default deadline of 300 s: 210 MB on a link that carries 25 MB/s."""
    with laboratory(2, rate="200mbit", names_lead_to_loopback=False) as (a, b):
        processes = []
        for role, host in (("train", a), ("receive", b)):
            job = Job(str(tmp_path), a.address, transport)
            command = [sys.executable, "-m", "benchmark.hosts.job", role, msgspec.json.encode(job).decode()]
            variables = paths({"OMP_NUM_THREADS": "1"})
            log = (tmp_path / f"{role}.log").open("w")
            processes.append(host.run(command, env=variables, stdout=log, stderr=log))
            log.close()
        end = time.monotonic() + _START_S
        while sent_by(a) < 50 << 20:
            assert time.monotonic() < end
            assert processes[0].poll() is None, (tmp_path / "train.log").read_text()
            time.sleep(0.1)
        b.set_link(up=False)
        cut_at = time.monotonic()
        for process in processes:
            process.wait(2 * NOTICED_S)
        assert time.monotonic() - cut_at < NOTICED_S + ENDS_S
    said = (tmp_path / "train.log").read_text()
    assert "EngineRefused" in said or "TornWeights" in said
    assert "host-b" in said or "engine rank 0" in said


def sent_by(host: Host) -> int:
    command = host.command(["cat", "/proc/net/dev"])
    return sent_by_link(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
