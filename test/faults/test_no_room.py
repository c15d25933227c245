"""Shared memory, disk or descriptors run out: refused with what is needed, and the old weights serve."""

import os
import re
import resource

import pytest

from support.cramped import can_mount, run_cramped

# Too little for one trainer rank's shards, eight pages; and enough for one of the two, who look at the same time.
SIZES = {"16k": "bytes free. Enlarge it", "40k": ""}


@pytest.fixture(scope="module")
def cramped(tmp_path_factory):
    """What came of updates in a process with mounts of its own."""
    if not can_mount():
        pytest.skip("unshare and mount are not allowed here")
    return run_cramped({"folder": str(tmp_path_factory.mktemp("cramped")), "sizes": list(SIZES)}, 200)


@pytest.mark.parametrize("size", SIZES)
def test_shared_memory_is_full(case, cramped, size):
    with case("/dev/shm full", f"publish, {size}", "ipc") as row:
        seen = cramped[size]
        assert seen["alive"]
        row.outcome = seen["outcome"]
        assert row.outcome == "old weights"
        for kind, message in seen["told"]:
            assert kind == "Unsupported"
            assert re.search(r"[\d,]+ bytes of shards .*into shared memory", message)
            assert SIZES[size] in message
        row.outcome += "; made good when there was room"


def test_the_disk_is_full(case, cramped):
    with case("disk full", "all", "all") as row:
        assert cramped["disk"] == 0
        row.outcome = "new weights: nothing is written to disk"


def test_nothing_is_left_where_there_is_no_room(case, cramped):
    with case("no room", "after all of it", "all") as row:
        row.outcome = "leak: " + ", ".join(cramped["left"]) if cramped["left"] else "nothing left behind"
        assert cramped["left"] == []


def allow_descriptors(me, limit, hard):
    """What is open stays open. `hard`: this process cannot raise the limit itself."""
    most = limit if hard else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def used_up(me):
    return len(os.listdir("/proc/self/fd")) + 20


def replace(me):
    for _, tensor in me.state:
        tensor._local_tensor = tensor._local_tensor.clone()


def test_a_trainer_rank_may_not_open_enough_files(scene, case):
    with case("descriptors of trainer rank 1 used up", "publish", "ipc") as row:
        scene.make_good("ipc")
        for player in scene.trainers:
            scene.call(player, replace)
        scene.call(scene.trainers[1], allow_descriptors, scene.call(scene.trainers[1], used_up), True)
        new = scene.begin("ipc")
        scene.until_ended()
        for ended in scene.failures().values():
            assert ended.kind == "Unsupported"
            assert "trainer rank 1 has to keep 8 more file descriptors open" in ended.message
        row.outcome = scene.judge(new)
        assert row.outcome == "old weights"
        scene.start_trainers()
        scene.make_good("ipc")
        row.outcome += "; a new trainer made it good"


@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast"])
def test_an_engine_rank_may_not_open_another_file(scene, case, transport):
    with case("descriptors of engine rank 1 used up", "plan", transport) as row:
        scene.start_trainers()
        scene.make_good("p2p" if transport == "ipc" else "ipc")
        scene.call(scene.engines[1], allow_descriptors, 3, False)
        new = scene.begin(transport)
        scene.until_ended()
        for ended in scene.failures().values():
            assert ended.kind
            assert "engine rank 1" in ended.message
        row.outcome = scene.judge(new)
        assert row.outcome == "old weights"
        scene.call(scene.engines[1], allow_descriptors, 500, False)
        scene.make_good(transport)
        row.outcome += "; made good when there was room"
