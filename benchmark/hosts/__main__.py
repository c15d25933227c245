"""Updates between hosts beside what their links carry: `python -m benchmark.hosts`, needs root and tc.

Every host sends at most RATE. A trainer's matrices are in shards over its hosts; each receiver is a plain module on a
host of its own, and takes all of them. All ways of a case run on the same hosts, one after another; the link's own
speed is measured before, by one TCP connection. The first update of each way plans and connects, and is not counted.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmark import pages, results
from benchmark.hosts.job import Job
from benchmark.results import Rows

sys.path.append(str(results.REPOSITORY / "test"))  # hosts are the tests'

from support.hosts import Host, environment, laboratory, why_not
from support.nixl_env import FOLDER as NIXL

RATE = "400mbit"
CASES = [(1, 1), (2, 2), (1, 2), (1, 4), (1, 8)]  # trainer hosts, receiver hosts
WAYS = [("p2p", False), ("nixl", False), ("nixl", True)]  # transport, and whether receivers pass on what they have
_DEADLINE_S = 900.0


def measure(hosts: Sequence[Host], trainers: int, receivers: int, link_bytes_s: float) -> Rows:
    """A row for each way. Seconds are of an update.

    model_bytes     of all matrices
    sent_bytes      by the trainer host that sends most, in an update, headers of the network included
    link_bytes_s    of one TCP connection between two of the hosts
    share_of_link   what the trainer host has to send if receivers pass on nothing, by what the link carries in the
                    same time: above 1 if they do
    """
    rows = []
    for way, relay in WAYS:
        if relay and receivers == 1:
            continue
        with tempfile.TemporaryDirectory() as folder:
            job = Job(folder, hosts[0].address, way, relay, trainers=trainers, receivers=receivers)
            placed = [("train", rank, hosts[rank]) for rank in range(trainers)]
            placed += [("receive", rank, hosts[trainers + rank]) for rank in range(receivers)]
            run([(role, msgspec.structs.replace(job, rank=rank), host) for role, rank, host in placed])
            timed = json.loads(Path(folder, "timed").read_text())
            assert timed["transports"] == [way]
            sent = max(int(Path(folder, f"sent-{rank}").read_text()) for rank in range(trainers))
            exact = all(Path(folder, f"exact-{rank}").read_text() == "True" for rank in range(receivers))
        median = statistics.median(timed["seconds"])
        must_send = job.nbytes / trainers * receivers
        row = {
            "trainers": trainers,
            "receivers": receivers,
            "transport": way,
            "relay": relay,
            "seconds_median": median,
            "seconds_min": min(timed["seconds"]),
            "model_bytes": job.nbytes,
            "sent_bytes": sent,
            "link_bytes_s": link_bytes_s,
            "share_of_link": must_send / link_bytes_s / median,
            "updates": job.updates,
            "bit_exact": exact,
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def link_speed(sender: Host, receiver: Host) -> float:
    """Returns bytes per second of one TCP connection."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, receiver.address)
        run([("sink", job, receiver), ("source", job, sender)])
        return float(Path(folder, "link").read_text())


def run(jobs: Sequence[tuple[str, msgspec.Struct, Host]], module: str = "benchmark.hosts.job") -> None:
    """Runs processes of a module on hosts until all have ended. Raises CalledProcessError if one failed."""
    python_path = f"{results.REPOSITORY}:{NIXL}"
    variables = environment(OMP_NUM_THREADS="1", PYTHONPATH=python_path)
    processes = []
    for role, job, host in jobs:
        command = [sys.executable, "-m", module, role, msgspec.json.encode(job).decode()]
        processes.append(host.run(command, env=variables))
    end = time.monotonic() + _DEADLINE_S
    for process in processes:
        if process.wait(max(1.0, end - time.monotonic())):
            raise subprocess.CalledProcessError(process.returncode, process.args)


def main() -> None:
    if reason := why_not():
        sys.exit(reason)
    rows: Rows = []
    for trainers, receivers in CASES:
        with laboratory(trainers + receivers, rate=RATE, names_lead_to_loopback=False) as hosts:
            rows += measure(hosts, trainers, receivers, link_speed(hosts[0], hosts[-1]))
    pages.publish("hosts", "make bench-hosts", rows, [f"Every host sends at most {RATE}."])


if __name__ == "__main__":
    main()
