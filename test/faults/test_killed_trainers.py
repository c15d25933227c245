"""A trainer rank is killed in each phase: all survivors hear of it soon, and a new trainer updates the same engine.

At the default deadline of 300 s, which must not matter.
"""

import pytest

from support.scenes import DETECT_S, message_names
from support.sweep import only

WAITS_S = 0.5  # by when a rank that called update waits for the others
PHASES = ["announce", "plan", "connect", "move", "verify", "commit"]
# At the end of `connect` ranks begin to write once they have heard each other: maybe before they hear of the kill.
BEFORE_A_BYTE = {"announce", "plan"}
OLD, ANY = {"old weights"}, {"old weights", "new weights", "torn, declared"}
CASES = [(rank, phase, transport) for rank in (1, 0) for phase in PHASES for transport in ("ipc", "p2p")]
CASES += [(1, "connect", "broadcast"), (1, "move", "broadcast"), (0, "move", "broadcast")]
# Each phase, each rank and each transport.
FEW = [(1, phase, transport) for phase, transport in zip(PHASES, ("ipc", "p2p") * 3, strict=True)]
FEW += [(0, "announce", "p2p"), (0, "move", "ipc"), (1, "move", "broadcast")]


def whom_to_hold(scene, rank, phase, transport):
    """The trainer rank itself where it has a part in the phase, else an engine rank that is in it."""
    own = phase in ("announce", "verify") or (transport == "p2p" and phase in ("plan", "connect", "move"))
    return scene.trainers[rank] if own else scene.engines[0]


def kill_and_go_on(scene, row, victim, new, outcomes, held=None, transport="ipc", **options):
    """Who is `held` is let go then. All survivors hear of it, and a new trainer goes on."""
    killed_at = scene.kill(victim)
    if held is not None:
        scene.let_go(held)
    row.detect_s = scene.noticed_after(killed_at)
    row.outcome = scene.judge(new)
    assert row.outcome in outcomes
    assert row.detect_s < DETECT_S
    for ended in scene.failures().values():
        # All bytes were there: the engine may have been done before anyone could know that one rank was gone.
        assert message_names(ended.message, victim) if ended.kind else row.outcome == "new weights", ended
    before = list(scene.trainers)
    for player in before:
        scene.kill(player)
    if left := scene.mapped_of(before):
        row.outcome = "leak: " + ", ".join(left)
    assert not left
    scene.start_trainers()
    scene.make_good(transport, **options)
    row.outcome += "; a new trainer made it good"


@pytest.mark.parametrize(("rank", "phase", "transport"), only(CASES, FEW.__contains__))
def test_a_trainer_rank_killed_in_a_phase(scene, case, rank, phase, transport):
    with case(f"trainer rank {rank} killed", phase, transport) as row:
        held, victim = whom_to_hold(scene, rank, phase, transport), scene.trainers[rank]
        new = scene.hold(held, phase, transport, verify="full" if phase == "verify" else "off")
        kill_and_go_on(scene, row, victim, new, OLD if phase in BEFORE_A_BYTE else ANY, held, transport)


@pytest.mark.parametrize("transport", ["ipc", "p2p"])
@pytest.mark.parametrize("rank", [1, 0])
def test_a_trainer_rank_killed_while_it_updates_in_the_background(scene, case, rank, transport):
    with case(f"trainer rank {rank} killed", "move, in the background", transport) as row:
        held = whom_to_hold(scene, rank, "move", transport)
        new = scene.hold(held, "move", transport, background=True)
        kill_and_go_on(scene, row, scene.trainers[rank], new, ANY, held, transport)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_trainer_rank_killed_between_updates(scene, case, rank):
    with case(f"trainer rank {rank} killed", "between updates", "ipc") as row:
        scene.make_good("ipc")
        victim = scene.trainers[rank]
        scene.kill(victim)
        kill_and_go_on(scene, row, victim, scene.begin("ipc"), OLD)


def test_a_trainer_rank_killed_while_the_other_waits_for_it_to_call_update(scene, case):
    with case("trainer rank 1 killed", "before its announce", "ipc") as row:
        scene.make_good("ipc")
        victim = scene.trainers[1]
        new = scene.begin("ipc", late=victim)
        scene.wait(WAITS_S)
        assert scene.busy()
        kill_and_go_on(scene, row, victim, new, OLD)


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_staged_weights_of_a_trainer_that_is_killed_never_count(scene, case, rank, transport):
    with case(f"trainer rank {rank} killed", "move, staged", transport) as row:
        held = scene.engines[0]
        new = scene.hold(held, "move", transport, staged=True)
        kill_and_go_on(scene, row, scene.trainers[rank], new, OLD, held, transport, staged=True)


@pytest.mark.parametrize("staged", [True, False])
def test_a_new_trainer_begins_while_staged_weights_of_a_dead_one_still_land(scene, case, staged):
    with case("all trainer ranks killed", "move, staged", "ipc") as row:
        slow = scene.engines[0]
        scene.hold(slow, "move", "ipc", staged=True)
        for player in list(scene.trainers):
            scene.kill(player)
        scene.start_trainers()
        new = scene.begin("ipc", staged=staged)
        scene.wait(WAITS_S)  # until the engine is asked
        scene.let_go(slow)
        scene.until_ended()
        row.outcome = scene.judge(new)
        assert row.outcome == "new weights", scene.failures()
        row.outcome += " of a new trainer, which waited for the old landing"
