"""The profile of an update names the steps of both sides, and what each takes."""

from __future__ import annotations

from benchmark import profile
from benchmark.matrices import Matrices


def test_a_profile_has_the_steps_of_both_sides() -> None:
    rows = profile.run(profile.Case(Matrices("tiny", 4, 8, 8), 1, 2, "p2p"))
    of = {(row["side"], row["step"]): row for row in rows}
    assert of.keys() == {(side, step) for side, step, *_ in profile.STEPS}, "no step is called otherwise now"
    assert of["engine", "votes"]["calls"] == 2
    for step in ("trace", "plan", "connect"):
        assert of["engine", step]["calls"] == 0
        assert of["engine", step]["first_seconds"] > 0
    for side in ("trainer", "engine"):
        whole = of[side, "update"]
        parts = [row for row in rows if row["side"] == side]
        assert whole["calls"] == 1
        assert 0 < whole["warm_cpu_seconds"] <= whole["warm_seconds"] < whole["first_seconds"]
        longest = max(row["warm_seconds"] for row in parts if row["step"] != "request and answer")
        assert longest <= 2 * whole["warm_seconds"]
