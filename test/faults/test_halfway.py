"""A rank dies while a message of many megabytes is halfway: whoever sends it, or receives it, hears of it soon.

At the default deadline of 300 s, which must not matter. In the toy's layout trainer rank 1 sends to engine rank 1.
"""

import pytest

from support.scenes import DETECT_S
from support.stations import Arm
from support.sweep import sweep

SCENE = {"hidden": 2048, "bucket_bytes": 2**27}  # 75 MB from rank to rank in one message
FILLS_S = 0.5  # the memory that the kernel has for a connection, whose other end does not read


def fill(scene, **options):
    """An update in which trainer rank 1 sends to engine rank 1, which is stopped when it has taken a part."""
    receiver = scene.engines[1]
    new = scene.begin("p2p", {1: Arm("send")}, **options)
    scene.until_held(scene.trainers[1])
    scene.wait(FILLS_S)  # until all receive
    receiver.stop()
    scene.let_go(scene.trainers[1])
    scene.wait(FILLS_S)
    assert scene.trainers[1].owes
    return new


@pytest.mark.parametrize("staged", [False, sweep(True)])
def test_the_receiver_dies(scene, case, staged):
    with case("engine rank 1 killed", "a message is halfway", "p2p") as row:
        fill(scene, staged=staged)
        row.detect_s = scene.noticed_after(scene.kill(scene.engines[1]))
        assert row.detect_s < DETECT_S
        assert all(ended.kind for ended in scene.failures().values())
        scene.make_ready()
        scene.make_good("p2p")
        row.outcome = "started again; the same trainer updated it"


@pytest.mark.parametrize("staged", [sweep(False), True])
def test_the_sender_dies(scene, case, staged):
    with case("trainer rank 1 killed", "a message is halfway", "p2p") as row:
        receiver, new = scene.engines[1], fill(scene, staged=staged)
        killed_at = scene.kill(scene.trainers[1])
        receiver.wake()
        row.detect_s = scene.noticed_after(killed_at)
        assert row.detect_s < DETECT_S
        row.outcome = scene.judge(new)
        assert row.outcome == ("old weights" if staged else "torn, declared")
        scene.start_trainers()
        scene.make_good("p2p")
        row.outcome += "; a new trainer made it good"
