"""An orchestra with a running score: which version its engine ranks have, what they became, and how it is made good."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sglang_reshard.protocol.messages import DEFAULT_TIMEOUT_S
from support.left_behind import Watch, mapped_from, settled
from support.orchestra import Orchestra
from support.player import Hang, Player
from support.stations import Act, Arm
from support.toy import DRIFTING, HIDDEN

DETECT_S = 10.0  # within which a killed rank must be noticed, at any deadline
_PATIENCE_S = 150.0  # after which we call it a hang


class Scene(Orchestra):
    """`version` is what the engine ranks have had since the last update that succeeded."""

    def __init__(
        self, folder: Path, timeout_s: float = DEFAULT_TIMEOUT_S, hidden: int = HIDDEN, bucket_bytes: int = 256
    ) -> None:
        super().__init__(folder, hidden=hidden)
        self.timeout_s, self._bucket_bytes, self._least_bucket_bytes = timeout_s, bucket_bytes, bucket_bytes
        self.watch = Watch()
        self.version = 0
        self._tried = 0

    def make_ready(self) -> None:
        """All ranks alive, and sound weights."""
        if len(self.engines) < 2 or any(not p.alive for p in self.engines):
            self.start_engines()
        if len(self.trainers) < 2 or any(not p.alive for p in self.trainers):
            self.start_trainers()

    def start_engines(self) -> None:
        super().start_engines()
        self.version = 0
        self.watch.look(p.pid for p in self.engines)

    def start_trainers(self, timeout_s: float | None = None) -> None:
        super().start_trainers(timeout_s or self.timeout_s)
        self.watch.look(p.pid for p in self.trainers)

    def begin(
        self,
        transport: str,
        arms: dict[int, Arm] | None = None,
        alike: bool = False,
        drift: bool = False,
        **options: Any,
    ) -> int:
        """An update to a version that was never tried, which has to be planned anew. The version.

        alike  it is like the one before, and has not to be planned
        drift  it differs little from others that have drifted
        """
        self._tried += 1
        if not alike:
            # Not only another than last time: what was refused at the first look leaves standing what was before it.
            self._bucket_bytes = self._least_bucket_bytes + 8 * (self._tried % 32)
        version = self._tried + DRIFTING if drift else self._tried
        self.update(version, transport, arms, self._bucket_bytes, **options)
        return version

    def hold(self, player: Player, phase: str, transport: str, skip: int = 0, act: Act = "wait", **options: Any) -> int:
        """Begin an update, until a rank has come to a phase of it. The version."""
        arm = Arm(phase, act, skip)
        if player in self.engines:
            self.arm(player, arm)
            new = self.begin(transport, **options)
        else:
            new = self.begin(transport, {player.rank: arm}, **options)
        self.until_held(player)
        return new

    def wait(self, seconds: float) -> None:
        """Lets time pass, in which ranks go on."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, 60, "time to pass")

    def noticed_after(self, since: float) -> float:
        """Seconds from then until the last of the survivors has raised, or has answered."""
        self.until_ended(_PATIENCE_S)
        told = [ended.at for ended in self.failures().values()]
        return max([*told, *(at for r, at in self.server.answered_at.items() if self.engines[r].alive)]) - since

    def judge(self, new: int) -> str:
        """What the engine has, by its live memory on all ranks, and by its word."""
        found = set(self.versions(self.version, new))
        said = all(not ended.kind for ended in self.failures().values()) and bool(self.failures())
        if said and found != {new}:
            return "silent mix: the trainer was told of success"
        if self.server.torn:
            return "torn, declared"
        if found == {new}:
            self.version = new
            return "new weights"
        return "old weights" if found == {self.version} else f"silent mix of versions: {found}"

    def make_good(self, transport: str, **options: Any) -> None:
        """A further update succeeds, bit by bit, on all ranks."""
        new = self.begin(transport, **options)
        self.until_ended(_PATIENCE_S)
        failed = {name: ended for name, ended in self.failures().items() if ended.kind}
        assert not failed, f"the update after the fault failed: {failed}"
        assert self.versions(new) == [new] * len(self.engines), "the update after the fault is not exact"
        assert not self.server.torn
        self.version = new

    def mapped_of(self, players: list[Player]) -> list[str]:
        """Memory of these trainer ranks that engine ranks go on mapping though they have ended."""
        pids = [p.pid for p in players if not p.alive]
        return settled(
            lambda: [f"{e.name} maps a dead trainer" for e in self.engines if e.alive and mapped_from(e.pid, pids)]
        )


def message_names(message: str, player: Player) -> bool:
    """Whether an error says who it is about."""
    return player.name in message or f"{player.name.removesuffix(str(player.rank))[:-1]}s [{player.rank}]" in message


def wait_until(true: Any, timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end:
            raise Hang(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.02)
