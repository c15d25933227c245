"""An engine rank is killed in each phase: the trainer hears of it soon, lives, and updates the engine's next life.

With the same `WeightSender`s all the time, at the default deadline of 300 s, which must not matter.
"""

import pytest

from support.scenes import DETECT_S, message_names
from support.sweep import only

PHASES = ["look", "plan", "connect", "move", "verify", "commit", "agreed"]
CASES = [(rank, phase, transport) for rank in (1, 0) for phase in PHASES for transport in ("ipc", "p2p")]
CASES += [(rank, phase, "broadcast") for rank in (1, 0) for phase in ("connect", "move")]
# Each phase, each rank and each transport.
FEW = [(1, phase, transport) for phase, transport in zip(PHASES, ("ipc", "p2p") * 4, strict=False)]
FEW += [(0, "look", "p2p"), (0, "move", "ipc"), (1, "move", "broadcast")]


def killed(scene, row, victim):
    """The trainer hears of it soon."""
    row.detect_s = scene.noticed_after(scene.kill(victim))
    assert row.detect_s < DETECT_S


def updated_again(scene, row, transport, **options):
    scene.start_engines()
    scene.make_good(transport, **options)
    row.outcome = "started again; the same trainer updated it"


@pytest.mark.parametrize(("rank", "phase", "transport"), only(CASES, FEW.__contains__))
def test_an_engine_rank_killed_in_a_phase(scene, case, rank, phase, transport):
    with case(f"engine rank {rank} killed", phase, transport) as row:
        victim, before = scene.engines[rank], [p.pid for p in scene.trainers]
        scene.hold(victim, phase, transport, verify="full" if phase == "verify" else "off")
        killed(scene, row, victim)
        told = scene.failures().values()
        assert len(told) == 2
        for ended in told:
            # Once all have agreed, the first rank's word is enough.
            assert message_names(ended.message, victim) if ended.kind else (rank, phase) == (1, "agreed"), ended
        updated_again(scene, row, transport)
        assert [p.pid for p in scene.trainers] == before


@pytest.mark.parametrize("rank", [1, 0])
def test_an_engine_rank_killed_between_updates(scene, case, rank):
    with case(f"engine rank {rank} killed", "between updates", "p2p") as row:
        scene.make_good("p2p")
        killed_at = scene.kill(scene.engines[rank])
        scene.begin("p2p")
        row.detect_s = scene.noticed_after(killed_at)
        assert row.detect_s < DETECT_S
        assert {ended.kind for ended in scene.failures().values()} == {"EngineRefused"}
        updated_again(scene, row, "p2p")


@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_an_engine_rank_killed_while_staged_weights_arrive(scene, case, transport):
    with case("engine rank 1 killed", "move, staged", transport) as row:
        scene.hold(scene.engines[1], "move", transport, staged=True)
        killed(scene, row, scene.engines[1])
        assert not scene.server.torn
        assert scene.versions(scene.version) == [scene.version], "the survivor has its old weights"
        updated_again(scene, row, transport, staged=True)
