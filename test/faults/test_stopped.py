"""A rank is stopped past the deadline and wakes up: others wait no longer for it, and it does no harm afterwards."""

import pytest

from support.scenes import message_names
from support.sweep import sweep

TIMEOUT_S = 3.0
SCENE = {"timeout_s": TIMEOUT_S}
NOTICED_S = 4 * TIMEOUT_S + 12.0  # a few waits one after the other, and some seconds for each other's last word
BEFORE_A_BYTE = {"announce", "look", "plan"}

TRAINERS = [
    (1, "announce", "ipc"),
    sweep(1, "connect", "p2p"),
    (1, "move", "p2p"),
    sweep(1, "verify", "ipc"),
    sweep(0, "announce", "p2p"),
    sweep(0, "move", "p2p"),
    sweep(0, "verify", "ipc"),
]
ENGINES = [
    (1, "plan", "ipc"),
    sweep(1, "connect", "p2p"),
    sweep(1, "move", "ipc"),
    (1, "move", "p2p"),
    sweep(1, "move", "broadcast"),
    sweep(0, "plan", "p2p"),
    (0, "move", "ipc"),
    sweep(0, "commit", "p2p"),
]


def stop(scene, victim, phase, transport, **options):
    """The victim stops in the middle of a phase, and finds itself let go when it wakes. What came of it by then."""
    options = {"verify": "full"} if phase == "verify" else options
    new = scene.hold(victim, phase, transport, **options)
    stopped_at = victim.stop()
    scene.let_go(victim)
    return new, scene.noticed_after(stopped_at)


def look_at(scene, victim):
    """How the update ended on the trainer ranks that were not stopped.

    They name the one that was, or one that waited for it: those time out together, and the first of them is heard.
    """
    told = [ended for name, ended in scene.failures().items() if name != victim.name]
    assert told
    for ended in told:
        assert ended.kind
        waited = "Is that rank stuck? Look at its log" in ended.message
        assert message_names(ended.message, victim) or waited, ended.message


def stop_and_wake(scene, row, victim, phase, transport):
    new, row.detect_s = stop(scene, victim, phase, transport)
    assert row.detect_s < NOTICED_S
    victim.wake()
    scene.until_ended()
    look_at(scene, victim)
    row.outcome = scene.judge(new)
    assert row.outcome in (["old weights"] if phase in BEFORE_A_BYTE else ["old weights", "torn, declared"])


def go_on(scene, row, transport):
    """With the same trainer if its ranks still reach each other, else with a new one."""
    new = scene.begin(transport)
    scene.until_ended()
    kinds = {ended.kind for ended in scene.failures().values()}
    if kinds == {""}:
        assert scene.judge(new) == "new weights"
        row.outcome += "; the next update made it good"
        return
    row.outcome += "; a new trainer made it good"
    assert kinds <= {"ConnectionLost", "Aborted"}, scene.failures()
    scene.start_trainers()
    scene.make_good(transport)


@pytest.mark.parametrize(("rank", "phase", "transport"), TRAINERS)
def test_a_trainer_rank_stopped_past_the_deadline(scene, case, rank, phase, transport):
    with case(f"trainer rank {rank} stopped", phase, transport) as row:
        stop_and_wake(scene, row, scene.trainers[rank], phase, transport)
        go_on(scene, row, transport)


@pytest.mark.parametrize(("rank", "phase", "transport"), ENGINES)
def test_an_engine_rank_stopped_past_the_deadline(scene, case, rank, phase, transport):
    with case(f"engine rank {rank} stopped", phase, transport) as row:
        stop_and_wake(scene, row, scene.engines[rank], phase, transport)
        scene.make_good(transport)
        row.outcome += "; the next update made it good"


@pytest.mark.parametrize("transport", [sweep("ipc"), "p2p"])
def test_staged_weights_that_come_too_late_never_count(scene, case, transport):
    with case("engine rank 1 stopped", "move, staged", transport) as row:
        new, row.detect_s = stop(scene, scene.engines[1], "move", transport, staged=True)
        assert row.detect_s < NOTICED_S
        scene.engines[1].wake()
        scene.until_ended()
        row.outcome = scene.judge(new)
        assert row.outcome == "old weights"
        scene.make_good(transport, staged=True)
        row.outcome += "; the next update made it good"


@pytest.mark.parametrize("phase", [sweep("connect"), "move"])
def test_a_trainer_that_was_replaced_while_it_was_stopped_does_no_harm_when_it_wakes(scene, case, phase):
    """Its messages are of older weights than those that the engine has got meanwhile."""
    with case("all trainer ranks stopped", phase, "p2p") as row:
        old = scene.trainers
        scene.hold(old[0], phase, "p2p")
        stopped_at = [player.stop() for player in old][-1]
        scene.let_go(old[0])
        scene.until(lambda: not any(p.owes for p in scene.engines), NOTICED_S, "the engine to give the update up")
        row.detect_s = max(scene.server.answered_at.values()) - stopped_at
        scene.set_aside()
        scene.start_trainers()
        scene.make_good("p2p")
        for player in old:
            player.wake()
        scene.until(lambda: not any(p.owes and p.alive for p in old), NOTICED_S, "the old trainer to give up")
        assert all(player.ended.kind for player in old)
        assert scene.versions(scene.version) == [scene.version] * 2
        assert not scene.server.torn
        scene.make_good("p2p")
        row.outcome = "a new trainer updated it; the old one changed nothing"
