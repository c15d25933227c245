"""Many updates with random faults at random points: after each, all engine ranks have the old weights, or all the new
ones, or the engine says that they are torn; and at the end nothing is left of anybody.

SGLANG_RESHARD_FAULTS_UPDATES says how many updates, SGLANG_RESHARD_FAULTS_SEED repeats the faults of another run.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

from support.left_behind import settled
from support.player import Player
from support.scenes import Scene
from support.stations import Arm

TIMEOUT_S = 3.0
SCENE = {"timeout_s": TIMEOUT_S}
SWEEP = os.environ.get("SGLANG_RESHARD_SWEEP") == "1"
UPDATES = int(os.environ.get("SGLANG_RESHARD_FAULTS_UPDATES", "40" if SWEEP else "6"))
SEED = int(os.environ.get("SGLANG_RESHARD_FAULTS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
FAULTS = ("kill", "kill", "kill", "kill", "stop", "raise", "raise", "flip", "none")
TRANSPORTS = ("ipc", "p2p", "broadcast")
ENGINE = ("look", "plan", "connect", "move", "commit", "agreed")
TRAINER = ("publish", "announce")
SENDING = ("plan", "connect", "move")  # of a trainer rank, where it sends
OLD, NEW, TORN, LOST = "old weights", "new weights", "torn, declared", "engine lost"
# For all but the one that is stopped: some waits, one after the other, and 10 s in which an engine rank that has voted
# asks the control server what became of the update.
_WAIT_S = 4 * TIMEOUT_S + 22.0
_UNTIL_S = 0.1  # about what an update takes that is planned anew
_GROWTH = 24  # descriptors that a process may have more at the end than when it was first looked at
Rank = tuple[str, int]  # of the trainer or of the engine


@dataclass(frozen=True)
class Weather:
    """One update of the storm.

    victim   who is killed or stopped; who raises, or has a bit flipped, is the rank `at` the station
    at       who is held where when it happens; None: it happens `after_s` seconds, whatever they do then
    """

    fault: str
    victim: Rank
    at: tuple[Rank, Arm] | None
    after_s: float
    transport: str
    staged: bool
    verify: str
    background: bool

    @classmethod
    def roll(cls, dice: random.Random) -> Weather:
        fault, transport = dice.choice(FAULTS), dice.choice(TRANSPORTS)
        verify = "full" if fault == "flip" else dice.choice(("off", "off", "sample", "full"))
        side = "engine" if fault == "flip" else dice.choice(("trainer", "engine", "engine"))
        stations = ENGINE if side == "engine" else TRAINER + (SENDING if transport == "p2p" else ())
        station = dice.choice(stations + ("verify",) * (verify != "off")) if fault != "flip" else "verify"
        skip = dice.choice((0, 1, 3)) if station == "move" and transport == "p2p" else 0
        at = (side, dice.randrange(2)), Arm(station, "wait", skip)
        victim = dice.choice((at[0], (dice.choice(("trainer", "engine")), dice.randrange(2))))
        sometime = fault in ("kill", "stop") and dice.random() < 0.3
        return cls(
            fault,
            victim if fault in ("kill", "stop") else at[0],
            None if sometime or fault == "none" else at,
            dice.random() * _UNTIL_S,
            transport,
            dice.random() < 0.3,
            verify,
            dice.random() < 0.3,
        )

    @property
    def what(self) -> str:
        return f"{self.victim[0]} rank {self.victim[1]}: {self.fault}" if self.fault != "none" else "no fault"

    @property
    def where(self) -> str:
        (side, rank), arm = self.at or (("", 0), Arm(""))
        phase = f"{arm.station} of {side} {rank}" if self.at else f"after {self.after_s * 1000:.0f} ms"
        return phase + (", staged" if self.staged else "") + (", in the background" if self.background else "")


@pytest.mark.timeout(1800 + 60 * UPDATES)
def test_a_storm(scene: Scene, case) -> None:
    dice = random.Random(SEED)
    print(f"SGLANG_RESHARD_FAULTS_SEED={SEED}")
    scene.make_good("ipc")
    first: dict[int, int] = {}
    for number in range(1, UPDATES + 1):
        weather = Weather.roll(dice)
        title, group = f"storm {SEED}/{number}: {weather.what}", f"updates in a storm: {weather.fault}"
        with case(title, weather.where, weather.transport, group) as row:
            row.outcome, row.detect_s = _live_through(scene, weather)
            assert row.outcome in ((NEW,) if weather.fault == "none" else (OLD, NEW, TORN, LOST)), weather
        _repair(scene, weather)
        for player in scene.everyone():
            first.setdefault(player.pid, _descriptors(player))
    with case(f"storm {SEED}", "after all of it", "p2p") as row:
        scene.make_good("p2p", verify="full")
        grown = settled(lambda: [p.name for p in scene.everyone() if _descriptors(p) > first[p.pid] + _GROWTH])
        row.outcome = f"leak: descriptors of {grown}" if grown else NEW
        assert not grown


def _live_through(scene: Scene, weather: Weather) -> tuple[str, float | None]:
    """What the engine has after the update, and how long it took the survivors of a kill to notice."""
    victim, new = _player(scene, weather.victim), _begin(scene, weather)
    if weather.at is None:
        scene.wait(weather.after_s)
        holder = None
    else:
        holder = _player(scene, weather.at[0])
        scene.until_held(holder)
    since = scene.kill(victim) if weather.fault == "kill" else None
    if weather.fault == "stop":
        victim.stop()
    if holder is not None:
        scene.let_go(holder, weather.fault if weather.fault in ("raise", "flip") else "go")
    if weather.fault == "stop":
        scene.until_ended(_WAIT_S)
        victim.wake()
    if since is not None:
        seconds = scene.noticed_after(since)
    else:
        seconds = None
        scene.until_ended()
    lost = any(not p.alive for p in scene.engines)
    return LOST if lost else scene.judge(new), seconds


def _begin(scene: Scene, weather: Weather) -> int:
    arms: dict[int, Arm] = {}
    if weather.at is not None:
        (side, rank), arm = weather.at
        if side == "engine":
            scene.arm(scene.engines[rank], arm)
        else:
            arms[rank] = arm
    options = {"staged": weather.staged, "verify": weather.verify, "background": weather.background}
    return scene.begin(weather.transport, arms, **options)


def _repair(scene: Scene, weather: Weather) -> None:
    """Start again whoever has died, and a trainer whose ranks do not reach each other any more; mend what is torn.

    Where trainer rank 0 was stopped, the control server was, too: a rank that then left the update for want of an
    answer has succeeded, and has no connection any more.
    """
    lost = {ended.kind for ended in scene.failures().values()} & {"ConnectionLost", "Aborted"}
    server_stopped = weather.fault == "stop" and weather.victim == ("trainer", 0)
    if lost or server_stopped or any(not p.alive for p in scene.trainers):
        scene.start_trainers()
    scene.make_ready()
    if scene.server.torn:
        scene.make_good(weather.transport)


def _player(scene: Scene, rank: Rank) -> Player:
    return (scene.engines if rank[0] == "engine" else scene.trainers)[rank[1]]


def _descriptors(player: Player) -> int:
    return len(os.listdir(f"/proc/{player.pid}/fd"))


def test_the_dice_fall_everywhere() -> None:
    """A storm that never kills a rank in `move`, say, would prove little."""
    dice = random.Random(1)
    rolled = [Weather.roll(dice) for _ in range(8000)]
    held = {(w.fault, *w.victim, w.at[0][0], w.at[1].station) for w in rolled if w.at is not None}
    for fault in ("kill", "stop"):
        for victim in (("trainer", 0), ("trainer", 1), ("engine", 0), ("engine", 1)):
            assert {(fault, *victim, "engine", station) for station in (*ENGINE, "verify")} <= held
        assert {(fault, "trainer", 1, "trainer", station) for station in (*TRAINER, *SENDING, "verify")} <= held
    assert {w.transport for w in rolled} == set(TRANSPORTS)
    assert any(w.at is None and w.fault == "kill" for w in rolled)
