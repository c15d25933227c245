"""What a hub knows of a session, without any connection: keys, gathers, scopes, and what their holders may cost."""

from types import SimpleNamespace

import pytest

from sglang_reshard.control import allgather as gathering
from sglang_reshard.control import protocol
from sglang_reshard.control import store as boards
from sglang_reshard.control.limits import MAX_NAME_CHARACTERS, MAX_WAITS, MemoryQuota, TimerHeap
from sglang_reshard.control.store import SessionStore

GONE = "has gone: its connection broke; was it killed? Look at its log"


@pytest.fixture
def table():
    """A board, what it said to whom, and its clock."""
    said, budget, deadlines = [], MemoryQuota(10**6), TimerHeap()
    board = SessionStore(lambda member, reply: said.append((member, reply)), budget, deadlines)
    return SimpleNamespace(board=board, said=said, budget=budget, deadlines=deadlines, now=0.0)


def ask(table, member, kind, *fields):
    """What is said to anybody at once."""
    table.said.clear()
    table.board.take(member, kind(1, *fields), table.now)
    return list(table.said)


def later(table, now):
    table.said.clear()
    table.now = now
    table.deadlines.expire(now)
    return list(table.said)


def get(table, member, *keys, timeout_s=10.0, scope=""):
    return ask(table, member, protocol.Get, keys, timeout_s, scope, True)


def gather(table, member, index, size=2, data=b"", timeout_s=10.0, scope="", name="g"):
    return ask(table, member, protocol.Gather, name, index, size, data, timeout_s, scope)


def done(*members):
    return [(member, protocol.Ok(1)) for member in members]


def test_a_get_is_answered_in_the_order_of_its_keys_once_all_are_there(table):
    assert get(table, "a", "x", "y", "x") == []
    assert ask(table, "b", protocol.Set, {"y": b"2"}) == done("b")
    assert ask(table, "b", protocol.Set, {"x": b"1", "z": b"3"}) == [
        ("a", protocol.Values(1, (b"1", b"2", b"1"))),
        *done("b"),
    ]
    assert get(table, "b", "z") == [("b", protocol.Values(1, (b"3",)))]


def test_a_get_of_nothing_is_answered_at_once(table):
    assert get(table, "a") == [("a", protocol.Values(1, ()))]


def test_a_key_that_is_deleted_while_others_are_waited_for_is_waited_for_again(table):
    get(table, "a", "x", "y")
    ask(table, "b", protocol.Set, {"x": b"1"})
    assert ask(table, "b", protocol.Delete, ("x", "never")) == [("b", protocol.Number(1, 1))]
    assert ask(table, "b", protocol.Set, {"y": b"2"}) == done("b")
    assert ("a", protocol.Values(1, (b"3", b"2"))) in ask(table, "b", protocol.Set, {"x": b"3"})


def test_a_late_get_hears_which_of_its_keys_are_missing(table):
    get(table, "a", "x", "y", "z", timeout_s=3)
    ask(table, "b", protocol.Set, {"y": b""})
    assert later(table, 2.9) == []
    assert later(table, 3.0) == [("a", protocol.TimedOut(1, (0, 2)))]
    assert ask(table, "b", protocol.Set, {"x": b"", "z": b""}) == done("b")


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_who_has_no_time_does_not_wait(table, timeout_s):
    get(table, "a", "x", timeout_s=timeout_s)
    assert later(table, 0.0) == [("a", protocol.TimedOut(1, (0,)))]


def test_counters(table):
    assert ask(table, "a", protocol.Add, "n", 5) == [("a", protocol.Number(1, 5))]
    assert ask(table, "a", protocol.Add, "n", -7) == [("a", protocol.Number(1, -2))]
    assert get(table, "a", "n") == [("a", protocol.Values(1, (b"-2",)))]
    ask(table, "a", protocol.Set, {"t": b"text"})
    (_, refused), *_ = ask(table, "a", protocol.Add, "t", 1)
    assert "t is not a counter" in refused.message
    ask(table, "a", protocol.Set, {"full": b"%d" % (2**63 - 1)})
    (_, refused), *_ = ask(table, "a", protocol.Add, "full", 1)
    assert "64 bits" in refused.message
    assert get(table, "a", "full", "t") == [("a", protocol.Values(1, (b"%d" % (2**63 - 1), b"text")))]


def test_what_is_appended_is_numbered_and_wakes_who_waits_for_it(table):
    get(table, "a", "list/1")
    assert ask(table, "b", protocol.Append, "list", b"first") == done("b")
    assert ("a", protocol.Values(1, (b"second",))) in ask(table, "b", protocol.Append, "list", b"second")
    assert get(table, "b", "list/0", "list") == [("b", protocol.Values(1, (b"first", b"2")))]
    assert ask(table, "b", protocol.CountKeys) == [("b", protocol.Number(1, 3))]


def test_compare_and_set_is_what_torch_means_by_it(table):
    def swap(expected, desired):
        ((_, reply),) = ask(table, "a", protocol.CompareAndSet, "k", expected, desired)
        return reply.values[0]

    assert swap(b"no", b"1") == b"no"  # missing, and something was expected: nothing is set
    assert ask(table, "a", protocol.Exists, ("k",)) == [("a", protocol.Flags(1, (False,)))]
    assert swap(b"", b"1") == b"1"
    assert swap(b"2", b"3") == b"1"
    assert swap(b"1", b"3") == b"3"


def test_a_gather_lets_all_through_in_one_moment_and_is_forgotten(table):
    assert gather(table, "b", 1, data=b"B") == []
    everyone = protocol.Values(1, (b"A", b"B"))
    assert sorted(gather(table, "a", 0, data=b"A")) == [("a", everyone), ("b", everyone)]
    assert table.board.empty
    assert table.budget.stored_bytes == table.budget.names == 0
    assert gather(table, "a", 0) == []  # the name is free again
    assert later(table, 10.0) == [("a", protocol.TimedOut(1, (1,)))]


def test_a_late_gather_is_late_for_all_who_are_there_and_all_who_come(table):
    gather(table, "c", 2, size=4, timeout_s=50)
    gather(table, "a", 0, size=4, timeout_s=3)
    late = protocol.TimedOut(1, (1, 3))
    assert sorted(later(table, 3.0)) == [("a", late), ("c", late)]
    table.now = 100.0
    assert gather(table, "b", 1, size=4) == [("b", late)]
    assert gather(table, "b", 1, size=4) == [("b", late)]
    assert gather(table, "d", 3, size=4) == [("d", late)]
    assert table.board.empty  # all know it
    assert table.budget.names == 0


def test_a_late_gather_is_forgotten_with_its_scope(table):
    gather(table, "a", 0, timeout_s=1, scope="s")
    later(table, 1.0)
    assert not table.board.empty
    ask(table, "a", protocol.Forget, "s")
    assert table.board.empty
    assert gather(table, "b", 1) == []


def test_a_place_in_a_gather_is_taken_once(table):
    gather(table, "a", 0, data=b"first")
    ((member, refused),) = gather(table, "b", 0, data=b"second")
    assert (member, "has come already" in refused.message) == ("b", True)
    assert ("a", protocol.Values(1, (b"first", b"other"))) in gather(table, "b", 1, data=b"other")


@pytest.mark.parametrize(("index", "size"), [(2, 2), (-1, 2), (0, 0), (0, 3)])
def test_a_gather_that_others_mean_differently_is_refused(table, index, size):
    gather(table, "a", 1)
    ((_, refused),) = gather(table, "b", index, size)
    assert isinstance(refused, protocol.Refused)
    assert "gather g" in refused.message


def test_who_goes_was_not_there(table):
    gather(table, "a", 0, size=3, data=b"A")
    gather(table, "b", 1, size=3, data=b"B")
    table.board.gone("a")
    gather(table, "c", 2, size=3)
    assert sorted(later(table, 10.0)) == [("b", protocol.TimedOut(1, (0,))), ("c", protocol.TimedOut(1, (0,)))]


def test_an_abort_ends_what_waits_in_the_scope_and_nothing_else(table):
    get(table, "a", "x", scope="s")
    get(table, "b", "x", scope="t")
    gather(table, "c", 0, scope="s")
    assert sorted(ask(table, "d", protocol.Abort, "s", "why")) == [
        ("a", protocol.Cancelled(1, "why")),
        ("c", protocol.Cancelled(1, "why")),
        *done("d"),
    ]
    assert ask(table, "d", protocol.Abort, "s", "another reason") == done("d")
    given_up = [("e", protocol.Cancelled(1, "why"))]
    assert get(table, "e", "x", scope="s") == given_up
    assert gather(table, "e", 1, scope="s") == given_up
    assert ask(table, "e", protocol.Enter, "s", "e") == ask(table, "e", protocol.Watch, "s") == given_up
    ask(table, "d", protocol.Forget, "s")
    assert ask(table, "e", protocol.Enter, "s", "e") == done("e")
    assert ("b", protocol.Values(1, (b"",))) in ask(table, "d", protocol.Set, {"x": b""})


def test_who_goes_out_of_a_scope_without_leaving_aborts_it(table):
    for member in ("a", "b"):
        assert ask(table, member, protocol.Enter, "s", f"rank {member}") == done(member)
    ask(table, "w", protocol.Watch, "s")
    get(table, "b", "x", scope="s")
    table.said.clear()
    table.board.gone("a")
    assert table.said == [
        ("w", protocol.ScopeAborted("s", f"rank a {GONE}")),
        ("b", protocol.Cancelled(1, f"rank a {GONE}")),
    ]


@pytest.mark.parametrize("word", [protocol.Leave(1, "s"), protocol.Disconnect(1)])
def test_who_left_may_go(table, word):
    ask(table, "a", protocol.Enter, "s", "rank a")
    ask(table, "b", protocol.Enter, "s", "rank b")
    table.board.take("a", word, 0.0)
    table.board.gone("a")
    assert ask(table, "c", protocol.Enter, "s", "rank c") == done("c")


def test_a_scope_that_all_left_is_not_kept(table):
    ask(table, "a", protocol.Enter, "s", "rank a")
    ask(table, "b", protocol.Watch, "s")
    ask(table, "a", protocol.Leave, "s")
    assert table.budget.names == 1
    ask(table, "b", protocol.Leave, "s")
    assert table.board.empty
    assert table.budget.names == 0


def test_the_end_leaves_nothing_and_answers_only_who_asked_for_it(table):
    ask(table, "a", protocol.Set, {"x": b"1"})
    ask(table, "a", protocol.Enter, "s", "rank a")
    get(table, "a", "y")
    get(table, "b", "y")
    gather(table, "a", 0, size=3)
    gather(table, "b", 1, size=3)
    table.said.clear()
    table.board.end("a")
    assert table.said == [("a", protocol.Cancelled(1, "the session was ended"))] * 2
    assert table.board.empty
    assert table.budget.stored_bytes == table.budget.names == 0
    assert later(table, 1e6) == []


def test_the_budget_is_kept_and_given_back(table):
    assert ask(table, "a", protocol.Set, {"x": bytes(900_000)}) == done("a")
    refusals = [
        ask(table, "b", protocol.Set, {"y": bytes(100_000)}),
        ask(table, "b", protocol.Append, "list", bytes(100_000)),
        gather(table, "b", 0, data=bytes(100_000)),
    ]
    for ((member, refused),) in refusals:
        assert (member, "more than 1000000 bytes" in refused.message) == ("b", True)
    assert ask(table, "b", protocol.CountKeys) == [("b", protocol.Number(1, 2))]  # x, and an empty list's count
    ask(table, "a", protocol.Set, {"x": b""})
    assert ask(table, "b", protocol.Set, {"y": bytes(100_000)}) == done("b")
    ask(table, "b", protocol.Delete, ("x", "y", "list"))
    assert table.budget.stored_bytes == table.budget.names == 0


def test_names_are_bounded_in_number_and_length(table):
    table.budget._most_names = 3
    assert ask(table, "a", protocol.Set, dict.fromkeys("xyz", b"")) == done("a")
    for kind, fields in ((protocol.Set, ({"v": b""},)), (protocol.Enter, ("s", "who")), (protocol.Add, ("n", 1))):
        ((_, refused),) = ask(table, "a", kind, *fields)
        assert "3 names" in refused.message
    long = "x" * (MAX_NAME_CHARACTERS + 1)
    for kind, fields in (
        (protocol.Set, ({long: b""},)),
        (protocol.Get, ((long,), 1.0, "", True)),
        (protocol.Get, (("k",), 1.0, long, True)),
        (protocol.Gather, (long, 0, 2, b"", 1.0, "")),
        (protocol.Enter, (long, "who")),
        (protocol.CompareAndSet, (long, b"", b"")),
    ):
        ((_, refused),) = ask(table, "a", kind, *fields)
        assert f"at most {MAX_NAME_CHARACTERS}" in refused.message


def test_waits_are_bounded(table):
    for _ in range(MAX_WAITS):
        assert get(table, "a", "x") == []
    ((_, refused),) = get(table, "a", "x")
    assert "waits" in refused.message
    assert get(table, "b", "x") == []
    ask(table, "b", protocol.Set, {"x": b""})
    assert get(table, "a", "y") == []


def test_answers_are_bounded(table, monkeypatch):
    monkeypatch.setattr(boards, "MAX_FRAME_BYTES", 1000)
    monkeypatch.setattr(gathering, "MAX_FRAME_BYTES", 1000)
    ask(table, "a", protocol.Set, {"x": bytes(600), "y": bytes(600)})
    assert isinstance(get(table, "a", "x")[0][1], protocol.Values)
    ((_, refused),) = get(table, "a", "x", "y")
    assert "ask for less" in refused.message
    gather(table, "a", 0, data=bytes(600))
    ((_, refused),) = gather(table, "b", 1, data=bytes(600))
    assert "1000 bytes" in refused.message


def test_waits_that_are_over_do_not_pile_up():
    deadlines = TimerHeap()
    items = [SimpleNamespace(over=False) for _ in range(10_000)]
    for item in items:
        deadlines.add(0.0, 300.0, item)
        item.over = True
    assert len(deadlines._heap) < 200
