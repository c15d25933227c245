"""Faults while only what has changed is sent: nobody hangs, nothing is mixed, and the next update is exact.

An engine whose weights are not what a delta changes gets all of them.
"""

from __future__ import annotations

import pytest
import torch

from support.scenes import DETECT_S, message_names

DELTA = {"delta": "auto", "drift": True, "alike": True}
# Who is killed; who is held for it, where, and how often it passes first: of two parts, one has been written then.
CASES = [
    ("engine", 1, "engine", 1, "apply", 1),
    ("engine", 0, "engine", 1, "apply", 0),
    ("trainer", 1, "engine", 0, "apply", 1),
    ("trainer", 1, "trainer", 1, "encode", 0),
    ("trainer", 1, "trainer", 1, "send deltas", 0),
    ("trainer", 0, "engine", 1, "commit", 0),
]


def player_of(scene, side, rank):
    return (scene.engines if side == "engine" else scene.trainers)[rank]


def make_a_base(scene):
    """Two updates: of the second one it is known that only what has changed was sent."""
    scene.make_good("p2p", delta="auto", drift=True)
    before = received(scene)
    scene.make_good("p2p", **DELTA)
    assert received(scene) < before / 4, "a delta"


def received(scene):
    return scene.call(scene.engines[0], received_bytes)


def received_bytes(me):
    return me.receiver._executor.transfer.end.traffic.received_bytes


@pytest.mark.parametrize(("side", "rank", "of", "at", "phase", "skip"), CASES)
def test_a_rank_killed_while_deltas_move(scene, case, side, rank, of, at, phase, skip):
    with case(f"{side} rank {rank} killed", f"{phase} of {of} {at}, a delta", "p2p") as row:
        make_a_base(scene)
        victim, held = player_of(scene, side, rank), player_of(scene, of, at)
        new = scene.hold(held, phase, "p2p", skip, **DELTA)
        killed_at = scene.kill(victim)
        scene.let_go(held)
        row.detect_s = scene.noticed_after(killed_at)
        row.outcome = "engine lost" if side == "engine" else scene.judge(new)
        assert row.detect_s < DETECT_S
        if side == "trainer":
            assert row.outcome in ("old weights", "new weights", "torn, declared")
        for ended in scene.failures().values():
            assert message_names(ended.message, victim) if ended.kind else row.outcome == "new weights", ended
        scene.make_ready()
        make_a_base(scene)


def spoil(me):
    """One bit of the live weights, as nobody should."""
    me.model.down.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def test_weights_that_somebody_has_changed_are_sent_whole(scene, case):
    with case("engine rank 1: a bit of the live weights flipped", "between updates, deltas", "p2p") as row:
        make_a_base(scene)
        scene.call(scene.engines[1], spoil)
        scene.make_good("p2p", **DELTA)
        row.outcome = "new weights"
