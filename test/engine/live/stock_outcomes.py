"""What the outcomes of `stock_steps` have to be, whatever engine took the steps."""

from __future__ import annotations

from typing import Any

from stock_steps import LONG

_REFUSED = [
    "disk: no checkpoint",
    "disk: dummy weights",
    "disk: a version of no checkpoint",
    "group: none to destroy",
    "group: destroyed twice",
]
_FIRST = ["disk: back", "disk: at the end", "disk: cache kept", "abort: cache flushed", "in_place: cache flushed"]
_SECOND = [
    "disk: after the refusal",
    "tensors: a flattened bucket",
    "tensors: weights 2 again",
    "group: a flattened bucket",
    "group: weights 2",
    "retract: cache flushed",
    "resumed: weights 2",
]


def did_what_they_say(outcomes: dict[str, Any]) -> dict[str, bool]:
    """Whether steps that bring weights 1 or 2 brought those, and whether what must be refused was."""

    def weights(name: str) -> str:
        found = outcomes.get(f"{name}: the session ends", outcomes[name])["weights"]
        assert isinstance(found, str)
        return found

    first, second = weights("disk: weights 1"), weights("disk: weights 2")
    return {
        "weights 1 and 2 differ": first != second,
        **{name: weights(name) == first for name in _FIRST},
        **{name: weights(name) == second for name in _SECOND},
        **{name: outcomes[name]["answer"][0] is False for name in _REFUSED},
        "some layers alone": weights("tensors: one layer of weights 1") not in (first, second),
        "a version": outcomes["disk: a version"]["says"][2] == "first",
        "no version": outcomes["disk: a version of no checkpoint"]["says"][2] == "first",
        "an aborted request": outcomes["disk: how the request ended"]["answer"] == "abort",
        "retracted": outcomes["retract: continued"]["answer"] == ["length", LONG],
        "in place": outcomes["in_place: continued"]["answer"] == ["length", LONG],
    }
