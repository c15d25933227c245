"""What a rank does wrong in the middle of an update: it raises, a bit flips, or a shard's memory goes."""

import pytest

TRANSPORTS = ["ipc", "p2p", "broadcast"]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_is_found_named_and_healed(scene, case, transport, staged):
    with case("a bit flipped on engine rank 1", "move, staged" if staged else "move", transport) as row:
        scene.make_good(transport)
        new = scene.hold(scene.engines[1], "verify", transport, verify="full", staged=staged)
        scene.let_go(scene.engines[1], "flip")
        scene.until_ended()
        row.outcome = scene.judge(new)
        assert row.outcome == ("old weights" if staged else "torn, declared")
        for ended in scene.failures().values():
            assert "engine rank 1: the received weights differ from the trainer's" in ended.message
            assert "down.weight" in ended.message
        scene.make_good(transport, verify="full", staged=staged)
        row.outcome += "; the next update made it good"


@pytest.mark.parametrize("phase", ["plan", "connect", "move", "commit"])
@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_an_engine_rank_that_raises_is_heard_by_all(scene, case, transport, phase):
    with case("engine rank 1 raised", phase, transport) as row:
        new = scene.hold(scene.engines[1], phase, transport)
        scene.let_go(scene.engines[1], "raise")
        scene.until_ended()
        row.outcome = scene.judge(new)
        assert row.outcome == ("torn, declared" if phase in ("move", "commit") else "old weights")
        for ended in scene.failures().values():
            assert "engine rank 1" in ended.message
            assert "stumbled" in ended.message
        scene.make_good(transport)
        row.outcome += "; the next update made it good"


@pytest.mark.parametrize("phase", ["publish", "plan", "connect", "move"])
def test_a_trainer_rank_that_raises_is_heard_by_all(scene, case, phase):
    with case("trainer rank 1 raised", phase, "p2p") as row:
        new = scene.hold(scene.trainers[1], phase, "p2p")
        scene.let_go(scene.trainers[1], "raise")
        scene.until_ended()
        row.outcome = scene.judge(new)
        assert row.outcome == ("torn, declared" if phase == "move" else "old weights")
        for ended in scene.failures().values():
            assert "stumbled" in ended.message
        scene.make_good("p2p")
        row.outcome += "; the next update made it good"
