"""What a hub knows of a session, without any connection: keys, gathers, scopes, and what their holders may cost."""

from types import SimpleNamespace

import pytest

from sglang_reshard.channel import board as boards
from sglang_reshard.channel import gathers as gathering
from sglang_reshard.channel import words
from sglang_reshard.channel.board import Board
from sglang_reshard.channel.limits import MAX_NAME_CHARACTERS, MAX_WAITS, Budget, Deadlines

GONE = "has gone: its connection broke; was it killed? Look at its log"


@pytest.fixture
def table():
    """A board, what it said to whom, and its clock."""
    said, budget, deadlines = [], Budget(10**6), Deadlines()
    board = Board(lambda member, reply: said.append((member, reply)), budget, deadlines)
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
    return ask(table, member, words.Get, keys, timeout_s, scope, True)


def gather(table, member, index, size=2, data=b"", timeout_s=10.0, scope="", name="g"):
    return ask(table, member, words.Gather, name, index, size, data, timeout_s, scope)


def done(*members):
    return [(member, words.Done(1)) for member in members]


def test_a_get_is_answered_in_the_order_of_its_keys_once_all_are_there(table):
    assert get(table, "a", "x", "y", "x") == []
    assert ask(table, "b", words.Set, {"y": b"2"}) == done("b")
    assert ask(table, "b", words.Set, {"x": b"1", "z": b"3"}) == [
        ("a", words.Values(1, (b"1", b"2", b"1"))),
        *done("b"),
    ]
    assert get(table, "b", "z") == [("b", words.Values(1, (b"3",)))]


def test_a_get_of_nothing_is_answered_at_once(table):
    assert get(table, "a") == [("a", words.Values(1, ()))]


def test_a_key_that_is_deleted_while_others_are_waited_for_is_waited_for_again(table):
    get(table, "a", "x", "y")
    ask(table, "b", words.Set, {"x": b"1"})
    assert ask(table, "b", words.Delete, ("x", "never")) == [("b", words.Number(1, 1))]
    assert ask(table, "b", words.Set, {"y": b"2"}) == done("b")
    assert ("a", words.Values(1, (b"3", b"2"))) in ask(table, "b", words.Set, {"x": b"3"})


def test_a_late_get_hears_which_of_its_keys_are_missing(table):
    get(table, "a", "x", "y", "z", timeout_s=3)
    ask(table, "b", words.Set, {"y": b""})
    assert later(table, 2.9) == []
    assert later(table, 3.0) == [("a", words.TooLate(1, (0, 2)))]
    assert ask(table, "b", words.Set, {"x": b"", "z": b""}) == done("b")


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_who_has_no_time_does_not_wait(table, timeout_s):
    get(table, "a", "x", timeout_s=timeout_s)
    assert later(table, 0.0) == [("a", words.TooLate(1, (0,)))]


def test_counters(table):
    assert ask(table, "a", words.Add, "n", 5) == [("a", words.Number(1, 5))]
    assert ask(table, "a", words.Add, "n", -7) == [("a", words.Number(1, -2))]
    assert get(table, "a", "n") == [("a", words.Values(1, (b"-2",)))]
    ask(table, "a", words.Set, {"t": b"text"})
    (_, refused), *_ = ask(table, "a", words.Add, "t", 1)
    assert "t is not a counter" in refused.message
    ask(table, "a", words.Set, {"full": b"%d" % (2**63 - 1)})
    (_, refused), *_ = ask(table, "a", words.Add, "full", 1)
    assert "64 bits" in refused.message
    assert get(table, "a", "full", "t") == [("a", words.Values(1, (b"%d" % (2**63 - 1), b"text")))]


def test_what_is_appended_is_numbered_and_wakes_who_waits_for_it(table):
    get(table, "a", "list/1")
    assert ask(table, "b", words.Append, "list", b"first") == done("b")
    assert ("a", words.Values(1, (b"second",))) in ask(table, "b", words.Append, "list", b"second")
    assert get(table, "b", "list/0", "list") == [("b", words.Values(1, (b"first", b"2")))]
    assert ask(table, "b", words.CountKeys) == [("b", words.Number(1, 3))]


def test_compare_and_set_is_what_torch_means_by_it(table):
    def swap(expected, desired):
        ((_, reply),) = ask(table, "a", words.Swap, "k", expected, desired)
        return reply.values[0]

    assert swap(b"no", b"1") == b"no"  # missing, and something was expected: nothing is set
    assert ask(table, "a", words.Present, ("k",)) == [("a", words.Flags(1, (False,)))]
    assert swap(b"", b"1") == b"1"
    assert swap(b"2", b"3") == b"1"
    assert swap(b"1", b"3") == b"3"


def test_a_gather_lets_all_through_in_one_moment_and_is_forgotten(table):
    assert gather(table, "b", 1, data=b"B") == []
    everyone = words.Values(1, (b"A", b"B"))
    assert sorted(gather(table, "a", 0, data=b"A")) == [("a", everyone), ("b", everyone)]
    assert table.board.empty
    assert table.budget.stored_bytes == table.budget.names == 0
    assert gather(table, "a", 0) == []  # the name is free again
    assert later(table, 10.0) == [("a", words.TooLate(1, (1,)))]


def test_a_late_gather_is_late_for_all_who_are_there_and_all_who_come(table):
    gather(table, "c", 2, size=4, timeout_s=50)
    gather(table, "a", 0, size=4, timeout_s=3)
    late = words.TooLate(1, (1, 3))
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
    ask(table, "a", words.Forget, "s")
    assert table.board.empty
    assert gather(table, "b", 1) == []


def test_a_place_in_a_gather_is_taken_once(table):
    gather(table, "a", 0, data=b"first")
    ((member, refused),) = gather(table, "b", 0, data=b"second")
    assert (member, "has come already" in refused.message) == ("b", True)
    assert ("a", words.Values(1, (b"first", b"other"))) in gather(table, "b", 1, data=b"other")


@pytest.mark.parametrize(("index", "size"), [(2, 2), (-1, 2), (0, 0), (0, 3)])
def test_a_gather_that_others_mean_differently_is_refused(table, index, size):
    gather(table, "a", 1)
    ((_, refused),) = gather(table, "b", index, size)
    assert isinstance(refused, words.Refused)
    assert "gather g" in refused.message


def test_who_goes_was_not_there(table):
    gather(table, "a", 0, size=3, data=b"A")
    gather(table, "b", 1, size=3, data=b"B")
    table.board.gone("a")
    gather(table, "c", 2, size=3)
    assert sorted(later(table, 10.0)) == [("b", words.TooLate(1, (0,))), ("c", words.TooLate(1, (0,)))]


def test_an_abort_ends_what_waits_in_the_scope_and_nothing_else(table):
    get(table, "a", "x", scope="s")
    get(table, "b", "x", scope="t")
    gather(table, "c", 0, scope="s")
    assert sorted(ask(table, "d", words.Abort, "s", "why")) == [
        ("a", words.GivenUp(1, "why")),
        ("c", words.GivenUp(1, "why")),
        *done("d"),
    ]
    assert ask(table, "d", words.Abort, "s", "another reason") == done("d")
    given_up = [("e", words.GivenUp(1, "why"))]
    assert get(table, "e", "x", scope="s") == given_up
    assert gather(table, "e", 1, scope="s") == given_up
    assert ask(table, "e", words.Enter, "s", "e") == ask(table, "e", words.Watch, "s") == given_up
    ask(table, "d", words.Forget, "s")
    assert ask(table, "e", words.Enter, "s", "e") == done("e")
    assert ("b", words.Values(1, (b"",))) in ask(table, "d", words.Set, {"x": b""})


def test_who_goes_out_of_a_scope_without_leaving_aborts_it(table):
    for member in ("a", "b"):
        assert ask(table, member, words.Enter, "s", f"rank {member}") == done(member)
    ask(table, "w", words.Watch, "s")
    get(table, "b", "x", scope="s")
    table.said.clear()
    table.board.gone("a")
    assert table.said == [
        ("w", words.ScopeAborted("s", f"rank a {GONE}")),
        ("b", words.GivenUp(1, f"rank a {GONE}")),
    ]


@pytest.mark.parametrize("word", [words.Leave(1, "s"), words.Bye(1)])
def test_who_left_may_go(table, word):
    ask(table, "a", words.Enter, "s", "rank a")
    ask(table, "b", words.Enter, "s", "rank b")
    table.board.take("a", word, 0.0)
    table.board.gone("a")
    assert ask(table, "c", words.Enter, "s", "rank c") == done("c")


def test_a_scope_that_all_left_is_not_kept(table):
    ask(table, "a", words.Enter, "s", "rank a")
    ask(table, "b", words.Watch, "s")
    ask(table, "a", words.Leave, "s")
    assert table.budget.names == 1
    ask(table, "b", words.Leave, "s")
    assert table.board.empty
    assert table.budget.names == 0


def test_the_end_leaves_nothing_and_answers_only_who_asked_for_it(table):
    ask(table, "a", words.Set, {"x": b"1"})
    ask(table, "a", words.Enter, "s", "rank a")
    get(table, "a", "y")
    get(table, "b", "y")
    gather(table, "a", 0, size=3)
    gather(table, "b", 1, size=3)
    table.said.clear()
    table.board.end("a")
    assert table.said == [("a", words.GivenUp(1, "the session was ended"))] * 2
    assert table.board.empty
    assert table.budget.stored_bytes == table.budget.names == 0
    assert later(table, 1e6) == []


def test_the_budget_is_kept_and_given_back(table):
    assert ask(table, "a", words.Set, {"x": bytes(900_000)}) == done("a")
    refusals = [
        ask(table, "b", words.Set, {"y": bytes(100_000)}),
        ask(table, "b", words.Append, "list", bytes(100_000)),
        gather(table, "b", 0, data=bytes(100_000)),
    ]
    for ((member, refused),) in refusals:
        assert (member, "more than 1000000 bytes" in refused.message) == ("b", True)
    assert ask(table, "b", words.CountKeys) == [("b", words.Number(1, 2))]  # x, and an empty list's count
    ask(table, "a", words.Set, {"x": b""})
    assert ask(table, "b", words.Set, {"y": bytes(100_000)}) == done("b")
    ask(table, "b", words.Delete, ("x", "y", "list"))
    assert table.budget.stored_bytes == table.budget.names == 0


def test_names_are_bounded_in_number_and_length(table):
    table.budget._most_names = 3
    assert ask(table, "a", words.Set, dict.fromkeys("xyz", b"")) == done("a")
    for kind, fields in ((words.Set, ({"v": b""},)), (words.Enter, ("s", "who")), (words.Add, ("n", 1))):
        ((_, refused),) = ask(table, "a", kind, *fields)
        assert "3 names" in refused.message
    long = "x" * (MAX_NAME_CHARACTERS + 1)
    for kind, fields in (
        (words.Set, ({long: b""},)),
        (words.Get, ((long,), 1.0, "", True)),
        (words.Get, (("k",), 1.0, long, True)),
        (words.Gather, (long, 0, 2, b"", 1.0, "")),
        (words.Enter, (long, "who")),
        (words.Swap, (long, b"", b"")),
    ):
        ((_, refused),) = ask(table, "a", kind, *fields)
        assert f"at most {MAX_NAME_CHARACTERS}" in refused.message


def test_waits_are_bounded(table):
    for _ in range(MAX_WAITS):
        assert get(table, "a", "x") == []
    ((_, refused),) = get(table, "a", "x")
    assert "waits" in refused.message
    assert get(table, "b", "x") == []
    ask(table, "b", words.Set, {"x": b""})
    assert get(table, "a", "y") == []


def test_answers_are_bounded(table, monkeypatch):
    monkeypatch.setattr(boards, "MAX_FRAME_BYTES", 1000)
    monkeypatch.setattr(gathering, "MAX_FRAME_BYTES", 1000)
    ask(table, "a", words.Set, {"x": bytes(600), "y": bytes(600)})
    assert isinstance(get(table, "a", "x")[0][1], words.Values)
    ((_, refused),) = get(table, "a", "x", "y")
    assert "ask for less" in refused.message
    gather(table, "a", 0, data=bytes(600))
    ((_, refused),) = gather(table, "b", 1, data=bytes(600))
    assert "1000 bytes" in refused.message


def test_waits_that_are_over_do_not_pile_up():
    deadlines = Deadlines()
    items = [SimpleNamespace(over=False) for _ in range(10_000)]
    for item in items:
        deadlines.add(0.0, 300.0, item)
        item.over = True
    assert len(deadlines._heap) < 200
