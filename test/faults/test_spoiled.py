"""What a rank does wrong in the middle of an update: it raises, a bit flips, or a shard's memory goes."""

import pytest

TRANSPORTS = ["ipc", "p2p", "broadcast"]


def judged(scene, row, player, new, act, outcome, *words, **options):
    """It does that where it is held; all trainer ranks are told so, and the next update is exact."""
    scene.let_go(player, act)
    scene.until_ended()
    row.outcome = scene.judge(new)
    assert row.outcome == outcome
    for ended in scene.failures().values():
        assert all(word in ended.message for word in words), ended
    scene.make_good(row.transport, **options)
    row.outcome += "; the next update made it good"


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_is_found_named_and_healed(scene, case, transport, staged):
    with case("a bit flipped on engine rank 1", "move, staged" if staged else "move", transport) as row:
        scene.make_good(transport)
        player, options = scene.engines[1], {"verify": "full", "staged": staged}
        new = scene.hold(player, "verify", transport, **options)
        words = "engine rank 1: the received weights differ from the trainer's", "down.weight"
        judged(scene, row, player, new, "flip", "old weights" if staged else "torn, declared", *words, **options)


@pytest.mark.parametrize("phase", ["plan", "connect", "move", "commit"])
@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_an_engine_rank_that_raises_is_heard_by_all(scene, case, transport, phase):
    with case("engine rank 1 raised", phase, transport) as row:
        player, outcome = scene.engines[1], "torn, declared" if phase in ("move", "commit") else "old weights"
        judged(scene, row, player, scene.hold(player, phase, transport), "raise", outcome, "engine rank 1", "stumbled")


@pytest.mark.parametrize("phase", ["publish", "plan", "connect", "move"])
def test_a_trainer_rank_that_raises_is_heard_by_all(scene, case, phase):
    with case("trainer rank 1 raised", phase, "p2p") as row:
        player, outcome = scene.trainers[1], "torn, declared" if phase == "move" else "old weights"
        judged(scene, row, player, scene.hold(player, phase, "p2p"), "raise", outcome, "stumbled")
