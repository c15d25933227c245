"""Faults while engine ranks read trainer memory by NIXL, over TCP: a stopped process's memory cannot be read then.

At the default deadline of 300 s, which must not matter. In the toy's layout engine rank 1 reads from trainer rank 1.
"""

import pytest

from support.nixl_env import needs_nixl, use_nixl
from support.scenes import DETECT_S, message_names
from support.sweep import sweep

pytestmark = needs_nixl
SCENE = {"hidden": 2048, "bucket_bytes": 2**25}  # 75 MB from rank to rank
HALFWAY_S = 0.5  # until all has arrived that can


def with_nixl(scene):
    for player in [*scene.trainers, *scene.engines]:
        scene.call(player, use_tcp)
    return scene


def use_tcp(_process):
    use_nixl("tcp,self")


def read_halfway(scene, **options):
    """An update in which engine rank 1 has begun to read, and trainer rank 1 is stopped."""
    reader, source = scene.engines[1], scene.trainers[1]
    new = with_nixl(scene).hold(reader, "read", "nixl", **options)
    source.stop()
    scene.let_go(reader)
    scene.wait(HALFWAY_S)
    assert scene.trainers[0].owes
    return new


@pytest.mark.parametrize("staged", [sweep(False), True])
def test_a_trainer_rank_is_killed_while_it_is_read(scene, case, staged):
    with case("trainer rank 1 killed", "read, staged" if staged else "read", "nixl") as row:
        new = read_halfway(scene, staged=staged)
        row.detect_s = scene.noticed_after(scene.kill(scene.trainers[1]))
        assert row.detect_s < DETECT_S
        row.outcome = scene.judge(new)
        assert row.outcome == ("old weights" if staged else "torn, declared")
        (told,) = scene.failures().values()
        assert "trainer rank 1" in told.message
        scene.start_trainers()
        with_nixl(scene).make_good("nixl")
        row.outcome += "; a new trainer made it good"


@pytest.mark.parametrize("phase", [sweep("plan"), sweep("connect"), "read", sweep("commit")])
def test_an_engine_rank_is_killed(scene, case, phase):
    with case("engine rank 1 killed", phase, "nixl") as row:
        with_nixl(scene).hold(scene.engines[1], phase, "nixl")
        row.detect_s = scene.noticed_after(scene.kill(scene.engines[1]))
        assert row.detect_s < DETECT_S
        assert all(message_names(ended.message, scene.engines[1]) for ended in scene.failures().values())
        scene.start_engines()
        with_nixl(scene).make_good("nixl")
        row.outcome = "started again; the same trainer updated it"


@pytest.mark.sweep
def test_what_was_being_read_when_an_update_was_aborted_never_lands(scene, case):
    with case("engine rank 0 killed", "read by engine rank 1", "nixl") as row:
        read_halfway(scene)
        reader, source = scene.engines[1], scene.trainers[1]
        scene.kill(scene.engines[0])
        scene.until(lambda: not reader.owes, DETECT_S, "engine rank 1 to give up its read")
        source.wake()
        scene.until_ended()
        scene.wait(HALFWAY_S)
        scene.start_engines()
        if not source.alive:  # UCX ends a process that goes on to answer one that has gone: "Fatal: Endpoint timeout"
            scene.start_trainers()
        with_nixl(scene).make_good("nixl")
        row.outcome = "started again; the same trainer updated it"
