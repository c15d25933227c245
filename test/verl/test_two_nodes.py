"""verl with a Ray of two nodes, which are hosts of their own: one engine over both follows a trainer on the first.

No variable is set for the network, and no interface.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seen import OURS, RESHARD, assert_arrived, assert_nothing_gathered, assert_says_the_same, cold_loads
from support import zygote
from support.hosts import Host, laboratory, why_not
from support.places import Places
from support.verl_host import environment, verl_folder

pytestmark = [
    pytest.mark.verl,
    pytest.mark.sweep,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
TRAINER_RANKS, ENGINE_RANKS = 2, 2
_DEADLINE_S = 600
_PORT = 6379


def test_an_engine_over_two_nodes_follows_a_trainer_on_one_of_them() -> None:
    overrides = [*RESHARD, f"{OURS}.verify=full", "trainer.n_gpus_per_node=1"]
    job = {"colocated": False, "ranks": TRAINER_RANKS, "replicas": 1, "tp_size": ENGINE_RANKS, "dtype": "float32"}
    with verl_folder() as folder, laboratory(2, names_lead_to_loopback=False) as (head, worker):
        address = f"{head.address}:{_PORT}"
        order = {**job, "folder": str(folder), "overrides": overrides, "ray": address}
        variables = {**environment(folder, ENGINE_RANKS), "RAY_ADDRESS": address, **zygote.ORDINARY}
        places = Places(folder)
        deadline = time.monotonic() + _DEADLINE_S
        # The trainer fits on the first node only, beside one of the two engine ranks.
        places.start(head, "ray", ray_node(head, TRAINER_RANKS + 1, "--head", f"--port={_PORT}"), variables)
        await_ray(places, head, address, 1, variables, deadline)
        places.start(worker, "ray", ray_node(worker, 1, f"--address={address}"), variables)
        await_ray(places, head, address, 2, variables, deadline)
        command = [sys.executable, "-m", "support.verl_driver", "jobs:two_updates", json.dumps(order)]
        places.await_end([places.start(head, "driver", command, variables)], deadline)
        seen = json.loads((folder / "result.json").read_text())
        updates = seen["updates"]
        assert_arrived(updates, cold_loads(folder, 2, ENGINE_RANKS, "float32"))
    assert_says_the_same(updates)
    assert_nothing_gathered(updates, ENGINE_RANKS)
    assert seen["interrupted"] == ["abort"]


def ray_node(host: Host, devices: int, *arguments: str) -> list[str]:
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", *arguments, f"--node-ip-address={host.address}", f"--num-gpus={devices}", "--num-cpus=8"]
    return [*command, f"--object-store-memory={128 << 20}", "--disable-usage-stats", "--block"]


def await_ray(places: Places, host: Host, address: str, nodes: int, variables: dict[str, str], deadline: float) -> None:
    """Waits until a driver on `host` finds so many nodes."""
    found = f"import ray, sys; ray.init(address={address!r}); sys.exit(sum(n['Alive'] for n in ray.nodes()) != {nodes})"
    while subprocess.run(
        host.command([sys.executable, "-c", found]), env=variables, capture_output=True, check=False
    ).returncode:
        assert time.monotonic() < deadline, places.logs()
        time.sleep(1)
