"""The trainer, two engine ranks, and what may happen to their messages, one step at a time.

    trainer  start -> sent -> revoking -> (writing ->) told -> start of the next update
    rank     idle -> enter -> begin -> first -> second -> commit -> idle

A rank writes its weights in two halves, each with what the trainer's memory holds in that moment: update 1's values
during update 1, and `TRAINING` once the trainer was told an outcome and trains on. A staged update writes the halves
to its shadow first, and votes again before it copies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_reshard.control import protocol
from sglang_reshard.protocol.update_channel import WRITING, WRITTEN
from support.revocation.server import Frozen, Server

RANKS = (0, 1)
TRAINING = 0  # in the trainer's memory between updates
OLD_WEIGHTS, NEW_WEIGHTS, TORN = "the old weights serve", "the new weights serve", "torn"


@dataclass(frozen=True)
class Rules:
    """Which update is modelled, how much may go wrong, and which rules of the protocol hold.

    duplicates, losses, timeouts, refusals  how many messages arrive twice, connections break, waits time out, and
                                            ranks vote that they cannot
    revokes, ends, marks, within, settles   False for a protocol without that rule: `violations` must find its fault
    """

    updates: int = 1
    staged: bool = False
    duplicates: int = 0
    losses: int = 0
    timeouts: int = 0
    refusals: int = 0
    revokes: bool = True
    ends: bool = True
    marks: bool = True
    within: bool = True
    settles: bool = True


class Reply(NamedTuple):
    """Of the server. `values`: what the members of an all-gather have passed, or mark, reason and members."""

    succeeded: bool
    values: tuple[bytes, ...]


class Rank(NamedTuple):
    """`torn`: the update that has left it so. `shadow`: as `live`. `connection`: its number, and whether it is lost."""

    at: str = "idle"
    update: int = 0
    live: tuple[int, int] = (-1, -1)
    shadow: tuple[int, int] = (-1, -1)
    torn: int = 0
    connection: int = 0
    lost: bool = False
    inbox: tuple[Reply, ...] = ()


class Trainer(NamedTuple):
    """`told`: outcome of each update. `answers`: the engine's, on their way. `lingers`: the update of another rank."""

    at: str = "start"
    update: int = 0
    told: tuple[str, ...] = ()
    answers: tuple[tuple[int, str], ...] = ()
    inbox: tuple[Reply, ...] = ()
    lingers: int = 0


class State(NamedTuple):
    """`requests`: on their way to the engine. `unnoticed`: broken connections that the server still counts with."""

    server: Frozen = Frozen()
    trainer: Trainer = Trainer()
    ranks: tuple[Rank, ...] = (Rank(), Rank())
    requests: tuple[int, ...] = ()
    unnoticed: tuple[str, ...] = ()
    spent: tuple[int, int, int, int] = (0, 0, 0, 0)  # duplicates, losses, timeouts, refusals
    fault: str = ""


Step = tuple[str, State]


def memory(state: State) -> int:
    """Returns the update whose values the trainer's memory holds."""
    trainer = state.trainer
    return TRAINING if len(trainer.told) >= trainer.update else trainer.update


def steps(state: State, rules: Rules) -> Iterator[Step]:
    """Yields what may happen next, and the state after it."""
    if state.fault:
        return
    yield from _trainer_steps(state, rules)
    yield from _engine_steps(state, rules)
    for index in RANKS:
        yield from _rank_steps(state, rules, index)
    yield from _mishaps(state, rules)


# -- the trainer


def _trainer_steps(state: State, rules: Rules) -> Iterator[Step]:
    trainer = state.trainer
    if trainer.lingers:
        left = _ask(state, "other", -1, "leave", _scope(trainer.lingers))
        yield "the other trainer rank leaves", _trainer(left, lingers=0)
    if trainer.at == "start" and trainer.update < rules.updates and not trainer.lingers:
        update = trainer.update + 1
        after = _ask(state, "trainer", -1, "delete_scope", _scope(update - 1)) if update > 1 else state
        for who in ("trainer", "other"):
            after = _ask(after, who, -1, "enter", _scope(update), who, "")
        after = _trainer(after, at="sent", update=update, lingers=update)
        yield f"request {update} is sent", after._replace(requests=(*after.requests, update))
    elif trainer.at == "sent":
        yield "the answer is given up", _gives_up(state, rules)
        for number, answer in enumerate(trainer.answers):
            rest = _trainer(state, answers=trainer.answers[:number] + trainer.answers[number + 1 :])
            if answer[0] != trainer.update:
                continue
            if answer[1] == NEW_WEIGHTS:
                yield "the engine answers success", _tell(rest, rules, NEW_WEIGHTS)
            elif answer[1] == TORN:
                yield "the engine answers that it is torn", _tell(rest, rules, TORN)
            else:
                yield "the engine answers a failure", _gives_up(rest, rules)
    elif trainer.at == "writing":
        yield "the trainer asks again", _trainer(_revoke(state, "trainer"), at="revoking")
        cancelled = _ask(state, "trainer", -1, "cancel", _engine_scope(trainer.update), "it took too long")
        yield "the trainer waits no longer", _trainer(cancelled, at="writing")
    elif trainer.at == "revoking" and trainer.inbox:
        mark, reason, members = (value.decode() for value in trainer.inbox[0].values)
        after = _trainer(state, inbox=())
        if not mark:
            yield "revoked", _tell(after, rules, OLD_WEIGHTS)
        elif mark == WRITTEN:
            yield "found written", _tell(after, rules, NEW_WEIGHTS)
        elif reason or members == "0":
            yield "found torn", _tell(after, rules, TORN)
        else:
            yield "found writing", _trainer(after, at="writing")


def _gives_up(state: State, rules: Rules) -> State:
    if not rules.revokes:
        return _tell(state, rules, OLD_WEIGHTS)
    return _trainer(_revoke(state, "trainer"), at="revoking")


def _revoke(state: State, who: str) -> State:
    return _ask(state, who, 1, "revoke", _engine_scope(state.trainer.update), "given up")


def _tell(state: State, rules: Rules, outcome: str) -> State:
    update = state.trainer.update
    if rules.ends:
        state = _ask(state, "trainer", -1, "end_scope", _scope(update))
    state = _ask(state, "trainer", -1, "leave", _scope(update))
    return _trainer(state, at="start", told=(*state.trainer.told, outcome), inbox=())


# -- the engine


def _engine_steps(state: State, rules: Rules) -> Iterator[Step]:
    """A request reaches the engine, which gives it to all ranks when they are idle."""
    if all(rank.at == "idle" for rank in state.ranks):
        for number, update in enumerate(state.requests):
            rest = state.requests[:number] + state.requests[number + 1 :]
            if state.spent[0] < rules.duplicates:
                again = _spend(state, 0)._replace(requests=state.requests)
                yield f"request {update} arrives, and will again", _begin(again, update)
            yield f"request {update} arrives", _begin(state._replace(requests=rest), update)


def _begin(state: State, update: int) -> State:
    for index in RANKS:
        state = _rank(state, index, at="enter", update=update, inbox=())
    return state


def _rank_steps(state: State, rules: Rules, index: int) -> Iterator[Step]:
    rank = state.ranks[index]
    name = f"rank {index}"
    if rank.at == "enter":
        if rank.lost:  # it joins the session again
            rank = rank._replace(connection=rank.connection + 1, lost=False)
            state = _rank(state, index, **rank._asdict())
        within = _scope(rank.update) if rules.within else ""
        entered = _ask(state, _client(state, index), -1, "enter", _engine_scope(rank.update), name, within)
        mark = WRITING if not rules.staged else ""
        yield f"{name} votes to begin", _vote(entered, index, "begin", mark, rules)
        if state.spent[3] < rules.refusals:
            yield f"{name} votes that it cannot", _vote(_spend(entered, 3), index, "refused", "", rules)
    elif rank.at in ("begin", "refused", "ready", "commit") and rank.lost:
        yield from _after_loss(state, rules, index)
    elif rank.at in ("begin", "refused", "ready", "commit") and rank.inbox:
        reply, after = rank.inbox[0], _rank(state, index, inbox=rank.inbox[1:])
        if reply.succeeded:
            yield f"{name} learns of the vote", _voted(after, rules, index, b"no" not in reply.values)
        else:
            yield f"{name} learns that it is aborted", _ended(after, index, aborted=True)
    elif rank.at == "first":
        yield f"{name} writes a half", _write(state, rules, index, 0)
    elif rank.at == "second":
        yield f"{name} writes the other half", _write(state, rules, index, 1)
    elif rank.at == "asking" and rank.inbox:
        yield f"{name} hears how the vote has ended", _heard(_rank(state, index, inbox=()), index, rank.inbox[0])


def _vote(state: State, index: int, phase: str, mark: str, rules: Rules) -> State:
    rank = state.ranks[index]
    gather = f"{_engine_scope(rank.update)}/{'begin' if phase == 'refused' else phase}"
    state = _rank(state, index, at=phase)
    if rank.lost:
        return state
    vote = b"no" if phase == "refused" else b"yes"
    arguments = gather, index, len(RANKS), vote, 1.0, _engine_scope(rank.update), mark if rules.marks else ""
    return _ask(state, _client(state, index), 1, "all_gather", *arguments)


def _voted(state: State, rules: Rules, index: int, agreed: bool) -> State:
    rank = state.ranks[index]
    if not agreed:
        return _ended(state, index, aborted=True)
    if rank.at in ("begin", "refused"):
        return _rank(state, index, at="first")
    if rank.at == "ready":
        return _live(_rank(state, index, at="commit", torn=rank.update), rules, index, rank.shadow)
    return _ended(_rank(state, index, torn=0), index, aborted=False)


def _write(state: State, rules: Rules, index: int, half: int) -> State:
    rank = state.ranks[index]
    into = list(rank.shadow if rules.staged else rank.live)
    into[half] = memory(state)
    following = "second" if half == 0 else ("ready" if rules.staged else "commit")
    if rules.staged:
        state = _rank(state, index, shadow=tuple(into))
        return _vote(state, index, "ready", WRITING, rules) if half else _rank(state, index, at=following)
    state = _rank(state, index, live=tuple(into), torn=rank.update, at=following)
    state = _forbidden(state, index)
    return _vote(state, index, "commit", WRITTEN, rules) if half else state


def _live(state: State, rules: Rules, index: int, values: tuple[int, int]) -> State:
    return _vote(_forbidden(_rank(state, index, live=values), index), index, "commit", WRITTEN, rules)


def _forbidden(state: State, index: int) -> State:
    """Notes a fault if a rank writes an update of which the trainer was told that it does not."""
    told, update = state.trainer.told, state.ranks[index].update
    if len(told) >= update and told[update - 1] == OLD_WEIGHTS:
        return state._replace(fault=f"engine rank {index} writes update {update}, which the trainer was told is dead")
    return state


def _after_loss(state: State, rules: Rules, index: int) -> Iterator[Step]:
    """A rank that has lost its connection in a vote asks by a new one how it has ended."""
    rank = state.ranks[index]
    begins = rank.at == "ready" or (rank.at == "begin" and not rules.staged)
    if not begins and rank.at != "commit":
        yield f"rank {index} gives up", _ended(state, index, aborted=True)
        return
    state = _rank(state, index, at="asking", connection=rank.connection + 1, lost=False, inbox=())
    if begins:
        state = _rank(state, index, torn=rank.torn or -rank.update)  # in doubt
    if rules.settles:
        state = _ask(state, _client(state, index), -1, "cancel", _engine_scope(rank.update), "lost")
    yield (
        f"rank {index} asks how the vote has ended",
        _ask(state, _client(state, index), 1, "revoke", _engine_scope(rank.update), "lost"),
    )


def _heard(state: State, index: int, reply: Reply) -> State:
    rank = state.ranks[index]
    mark = reply.values[0].decode() if reply.succeeded else None
    if rank.torn < 0:  # it has written nothing
        return _ended(_rank(state, index, torn=0 if mark in ("", WRITTEN) else rank.update), index, aborted=True)
    done = mark == WRITTEN
    return _ended(_rank(state, index, torn=0 if done else rank.torn), index, aborted=not done)


def _ended(state: State, index: int, *, aborted: bool) -> State:
    """The rank leaves. Rank 0 answers for all."""
    rank = state.ranks[index]
    if not rank.lost:
        state = _ask(state, _client(state, index), -1, "leave", _engine_scope(rank.update))
    if index == 0:
        answer = NEW_WEIGHTS if not aborted else (TORN if rank.torn else OLD_WEIGHTS)
        state = _trainer(state, answers=(*state.trainer.answers, (rank.update, answer)))
    return _rank(state, index, at="idle", inbox=())


# -- what goes wrong


def _mishaps(state: State, rules: Rules) -> Iterator[Step]:
    server = Server(state.server)
    if state.spent[2] < rules.timeouts:
        for gather in server.waiting():
            yield f"{gather} times out", _received(_spend(state, 2), gather)
    if state.spent[1] < rules.losses:
        for index in RANKS:
            if not state.ranks[index].lost and state.ranks[index].at != "idle":
                lost = _rank(_spend(state, 1), index, lost=True, inbox=())
                yield (
                    f"rank {index} loses its connection",
                    lost._replace(unnoticed=(*state.unnoticed, _client(state, index))),
                )
    for client in state.unnoticed:
        rest = tuple(other for other in state.unnoticed if other != client)
        server = Server(state.server)
        server.disconnected(client)
        yield f"the server notices the loss of {client}", _delivered(state._replace(unnoticed=rest), server)


def _received(state: State, gather: str) -> State:
    server = Server(state.server)
    server.time_out(gather)
    return _delivered(state, server)


# -- the wire


def _ask(state: State, client: str, number: int, operation: str, *arguments: Any) -> State:
    server = Server(state.server)
    server.do(client, number, operation, *arguments)
    return _delivered(state, server)


def _delivered(state: State, server: Server) -> State:
    """Puts what the server has sent into the inboxes of those that it was sent to; a lost connection receives nothing.

    What answers no request is left out: the next wait in the scope says the same.
    """
    state = state._replace(server=server.freeze())
    for client, message in server.sent:
        if getattr(message, "number", -1) < 0:
            continue
        reply = Reply(isinstance(message, protocol.Result), tuple(getattr(message, "value", None) or ()))
        if client == "trainer":
            state = _trainer(state, inbox=(*state.trainer.inbox, reply))
        for index in RANKS:
            if client == _client(state, index) and not state.ranks[index].lost:
                state = _rank(state, index, inbox=(*state.ranks[index].inbox, reply))
    return state


def _client(state: State, index: int) -> str:
    return f"rank {index}, connection {state.ranks[index].connection}"


def _rank(state: State, index: int, **changes: Any) -> State:
    ranks = list(state.ranks)
    ranks[index] = ranks[index]._replace(**changes)
    return state._replace(ranks=tuple(ranks))


def _trainer(state: State, **changes: Any) -> State:
    return state._replace(trainer=state.trainer._replace(**changes))


def _spend(state: State, which: int) -> State:
    return state._replace(spent=tuple(n + (i == which) for i, n in enumerate(state.spent)))  # type: ignore[arg-type]


def _scope(update: int) -> str:
    return f"update/{update}"


def _engine_scope(update: int) -> str:
    return f"update/{update}/0"
