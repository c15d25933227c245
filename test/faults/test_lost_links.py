"""The link of a host goes down in the middle of an update, or carries packets late and not all.

Hosts are namespaces. At the default deadline of 300 s, which must not matter.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.hosts import laboratory, why_not
from support.nixl_env import needs_nixl
from support.places import Places, paths
from support.sweep import sweep

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not())]
TEST = Path(__file__).parents[1]
JOB = TEST / "support" / "link_job.py"
NOTICED_S = 15.0  # 10 s, and what the trainer waits for the engine's last word
DOUBT_S = 10.0  # for which an engine rank that has voted asks the control server what became of the update
_START_S = 300.0
PHASES = ["announce", "look", "plan", "connect", "move", "verify", "commit", "agreed"]


class Job:
    """The processes of `link_job`."""

    def __init__(self, folder, hosts, transport, station):
        self._folder, self._hosts, self._transport, self._station = folder, hosts, transport, station
        self._processes, self._places = {}, Places(folder)

    def start(self, role, host, address=""):
        """`address` is the trainer's."""
        address = address or self._hosts[0].address
        command = [sys.executable, JOB, role, self._folder, address, self._transport, self._station]
        self._processes[role] = self._places.start(host, role, command, paths({"OMP_NUM_THREADS": "1"}))

    def until(self, name, seconds):
        """What a file says, once it is there."""
        path, end = self._folder / name, time.monotonic() + seconds
        while not path.exists():
            assert all(process.poll() in (None, 0) for process in self._processes.values()), self._places.logs()
            assert time.monotonic() < end, f"hang: no {name} within {seconds:g} s"
            time.sleep(0.02)
        return path.read_text()

    def lose(self, host, row, successor=None):
        """Runs both ends up to the station, pulls out a host's link, and checks what they say of it in time.

        successor  a host that takes the address of the trainer's, whose processes are killed
        """
        self.begin()
        host.set_link(up=False)
        if successor is not None:
            host.run(["kill", "-9", "-1"]).wait()
            self._processes.pop("train").wait()
            successor.take_address(host, known_to=[self._hosts[1]])
        cut_at = time.monotonic()
        self.let_go()
        said = {role: self.until(f"told-{role}", NOTICED_S + 30).split(" ", 1) for role in list(self._processes)}
        seconds = {role: float(ended) - cut_at for role, (ended, _) in said.items()}
        row.detect_s = max(seconds.values())
        if self._station == "commit":
            seconds["receive"] -= DOUBT_S
        assert max(seconds.values()) < NOTICED_S
        failure, values = said["receive"][1].rsplit("\n", 1)
        row.outcome = judged(values, failure)
        assert not row.bad
        if "train" in said:
            # Once all engine ranks have voted that they have written, the control server knows it, and so the trainer.
            well = said["train"][1].startswith("nothing")
            assert not well or self._station == "agreed", "the trainer was told that all went well"
            self._processes.pop("train").wait(NOTICED_S)

    def begin(self):
        """Starts both ends, and waits until one has come to the station."""
        self.start("train", self._hosts[0])
        self.start("receive", self._hosts[1])
        self.until("at", _START_S)

    def let_go(self):
        (self._folder / "go").touch()


def judged(values, failure):
    """What the module holds, and whether it says so."""
    if values in ("1", "2"):
        return "old weights" if values == "1" else "new weights"
    return "torn, declared" if failure.startswith("TornWeights") else f"silent mix of {values}"


@pytest.mark.parametrize(
    ("transport", "phase"),
    [
        *(("p2p", phase) if phase in ("move", "agreed") else sweep("p2p", phase) for phase in PHASES),
        *(pytest.param("nixl", p, marks=[needs_nixl, pytest.mark.sweep]) for p in (*PHASES[:4], "read", *PHASES[5:])),
    ],
)
@pytest.mark.parametrize("whose", ["the engine's", sweep("the trainer's")])
def test_a_link_goes_down(transport, phase, whose, tmp_path, case):
    with laboratory(2, names_lead_to_loopback=False) as hosts, case(f"{whose} link down", phase, transport) as row:
        job = Job(tmp_path, hosts, transport, phase)
        lost = hosts[whose == "the engine's"]
        job.lose(lost, row)
        lost.set_link(up=True)
        job.start("again", hosts[0])
        assert job.until("again", _START_S) == "3"
        row.outcome += "; a new trainer made it good"


@pytest.mark.parametrize("at_its_address", [sweep(False), sweep(True)])
@pytest.mark.parametrize("transport", ["p2p", pytest.param("nixl", marks=needs_nixl)], ids=["p2p", "nixl"])
def test_the_trainers_host_is_gone_for_good(transport, at_its_address, tmp_path, case):
    """Another host takes its place, and perhaps its address: it answers to whom the other one has known."""
    fault = "the trainer's host gone, its address another's" if at_its_address else "the trainer's host gone"
    with laboratory(3, names_lead_to_loopback=False) as hosts, case(fault, "move", transport) as row:
        gone, _, new = hosts
        job = Job(tmp_path, hosts, transport, "move" if transport == "p2p" else "read")
        job.lose(gone, row, new if at_its_address else None)
        job.start("again", new, gone.address if at_its_address else new.address)
        assert job.until("again", _START_S) == "3"
        row.outcome += "; a new trainer on another host made it good"


@pytest.mark.parametrize("transport", ["p2p", pytest.param("nixl", marks=[needs_nixl, pytest.mark.sweep])])
def test_packets_come_late_and_not_all(transport, tmp_path, case):
    """100 ms each way, and 1 % of them are lost."""
    fault = "100 ms delay, 1 % loss"
    with (
        laboratory(2, delay_s=0.1, loss=0.01, names_lead_to_loopback=False) as hosts,
        case(fault, "any", transport) as row,
    ):
        job = Job(tmp_path, hosts, transport, "agreed")
        job.begin()
        job.let_go()
        assert job.until("told-train", _START_S).endswith("nothing")
        failure, values = job.until("told-receive", _START_S).split(" ", 1)[1].rsplit("\n", 1)
        assert (failure, values) == ("nothing", "2")
        row.outcome = "new weights"


@pytest.mark.sweep
def test_idle_connections_outlive_lost_packets(tmp_path):
    """Probes of keepalive are lost like other packets."""
    with laboratory(2, delay_s=0.1, loss=0.1, names_lead_to_loopback=False) as hosts:
        roles = zip(("serve", "keep"), hosts, strict=True)
        command = [sys.executable, TEST / "support" / "idle_links.py"]
        ends = [
            host.run([*command, role, tmp_path, hosts[0].address], env=paths({}), stdout=subprocess.PIPE, text=True)
            for role, host in roles
        ]
        said = [end.communicate(timeout=180)[0] for end in ends]
    assert said == ["", "[]\n"]
