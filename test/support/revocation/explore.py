"""Visits every state of the model, and says what must not be in any."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from support.revocation.model import NEW_WEIGHTS, OLD_WEIGHTS, RANKS, TORN, Rules, State, steps


class Found(NamedTuple):
    """`trace`: the steps that lead to the fault; empty if there is none."""

    states: int
    transitions: int
    fault: str
    trace: tuple[str, ...]


def explore(rules: Rules) -> Found:
    """Visits the states breadth first, so that a fault's trace is a shortest one."""
    begin = State()
    came_from: dict[State, tuple[State, str] | None] = {begin: None}
    queue, transitions = deque([begin]), 0
    while queue:
        state = queue.popleft()
        following = list(steps(state, rules))
        transitions += len(following)
        if fault := violation(state, ended=not following):
            return Found(len(came_from), transitions, fault, _trace(came_from, state))
        for name, after in following:
            if after not in came_from:
                came_from[after] = state, name
                queue.append(after)
    return Found(len(came_from), transitions, "", ())


def violation(state: State, *, ended: bool) -> str:
    """Returns which promise a state breaks; empty if it keeps all. `ended`: nothing can happen any more."""
    if state.fault:
        return state.fault
    told = state.trainer.told
    for index in RANKS:
        rank = state.ranks[index]
        if rank.torn == 0 and rank.live[0] != rank.live[1]:
            return f"engine rank {index} serves a mixture of {rank.live}"
        if rank.torn == 0 and 0 in rank.live:
            return f"engine rank {index} serves values of a training step"
    if told and told[-1] == NEW_WEIGHTS and state.trainer.at == "start":
        newest = len(told)
        wrong = [index for index in RANKS if state.ranks[index].live != (newest, newest)]
        if wrong:
            return f"update {newest} has succeeded, and engine ranks {wrong} do not have it"
    if ended and told:
        torn = [index for index in RANKS if state.ranks[index].torn]
        if torn and TORN not in told:
            return f"engine ranks {torn} stay torn, and the trainer was told {told}"
        if not torn and len({rank.live for rank in state.ranks}) > 1:
            return f"engine ranks serve different weights: {[rank.live for rank in state.ranks]}"
    if ended and len(told) < state.trainer.update:
        return "the trainer waits for ever"
    dead = {update + 1 for update, outcome in enumerate(told) if outcome == OLD_WEIGHTS}
    serving = [index for index in RANKS if state.ranks[index].torn == 0 and dead.intersection(state.ranks[index].live)]
    return f"engine ranks {serving} serve an update of {dead}, which the trainer was told are dead" if serving else ""


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    names = []
    while (before := came_from[state]) is not None:
        state, name = before
        names.append(name)
    return tuple(reversed(names))
