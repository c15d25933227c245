"""The state of a session without any connection: keys, all-gathers, scopes, and what clients may use of memory."""

import msgspec
import pytest

from sglang_reshard.control import protocol, store
from sglang_reshard.control.connection import read_request
from sglang_reshard.control.scopes import MAX_NAME_CHARACTERS
from sglang_reshard.control.server import MemoryQuota
from sglang_reshard.control.store import MAX_WAITS, SessionStore, execute

ENDED = "{} has ended without this rank; was its process stopped?"


class Client(str):
    """A client that keeps what it is sent, beside its name."""

    def __new__(cls, name, sent):
        client = super().__new__(cls, name)
        client.sent = sent
        return client

    def send(self, message):
        self.sent.append((str(self), message))


class Timer:
    def __init__(self, time, function):
        self.time, self.function = time, function
        self.cancelled = False

    def cancel(self):
        self.cancelled = True


class Table:
    """A store, its clients, what it sent to whom, and its clock."""

    def __init__(self):
        self.sent, self.clients, self.timers, self.now = [], {}, [], 0.0
        self.quota = MemoryQuota(lambda: None)
        self.quota._max_bytes = 10**6
        self.store = SessionStore(self.quota.take, self.call_later)

    def call_later(self, delay, function):
        self.timers.append(timer := Timer(self.now + delay, function))
        return timer

    def client(self, name):
        return self.clients.setdefault(name, Client(name, self.sent))


@pytest.fixture
def table():
    return Table()


def ask(table, member, operation, *arguments):
    """What is sent to anybody at once."""
    table.sent.clear()
    number, name, arguments = read_request(msgspec.msgpack.encode((1, operation, arguments)))
    execute(table.store, protocol.Call(table.client(member), number), name, arguments)
    return list(table.sent)


def later(table, now):
    table.sent.clear()
    table.now = now
    for timer in sorted(table.timers, key=lambda timer: timer.time):
        if timer.time <= now and not timer.cancelled:
            timer.cancel()
            timer.function()
    return list(table.sent)


def get(table, member, *keys, timeout_s=10.0, scope=""):
    return ask(table, member, "get", keys, timeout_s, scope, True)


def gather(table, member, index, size=2, data=b"", timeout_s=10.0, scope="", name="g", mark=""):
    return ask(table, member, "all_gather", name, index, size, data, timeout_s, scope, mark)


def done(*members):
    return [(member, protocol.Result(1, None)) for member in members]


def test_a_get_is_answered_in_the_order_of_its_keys_once_all_are_there(table):
    assert get(table, "a", "x", "y", "x") == []
    assert ask(table, "b", "set", {"y": b"2"}) == done("b")
    assert ask(table, "b", "set", {"x": b"1", "z": b"3"}) == [
        ("a", protocol.Result(1, [b"1", b"2", b"1"])),
        *done("b"),
    ]
    assert get(table, "b", "z") == [("b", protocol.Result(1, [b"3"]))]


def test_a_key_that_is_deleted_while_others_are_waited_for_is_waited_for_again(table):
    get(table, "a", "x", "y")
    ask(table, "b", "set", {"x": b"1"})
    assert ask(table, "b", "delete_keys", ("x", "never")) == [("b", protocol.Result(1, 1))]
    assert ask(table, "b", "set", {"y": b"2"}) == done("b")
    assert ("a", protocol.Result(1, [b"3", b"2"])) in ask(table, "b", "set", {"x": b"3"})


def test_a_late_get_hears_which_of_its_keys_are_missing(table):
    get(table, "a", "x", "y", "z", timeout_s=3)
    ask(table, "b", "set", {"y": b""})
    assert later(table, 2.9) == []
    assert later(table, 3.0) == [("a", protocol.TimedOut(1, (0, 2)))]
    assert ask(table, "b", "set", {"x": b"", "z": b""}) == done("b")


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_who_has_no_time_does_not_wait(table, timeout_s):
    get(table, "a", "x", timeout_s=timeout_s)
    assert later(table, 0.0) == [("a", protocol.TimedOut(1, (0,)))]


def test_counters(table):
    assert ask(table, "a", "add", "n", 5) == [("a", protocol.Result(1, 5))]
    assert ask(table, "a", "add", "n", -7) == [("a", protocol.Result(1, -2))]
    assert get(table, "a", "n") == [("a", protocol.Result(1, [b"-2"]))]
    ask(table, "a", "set", {"t": b"text"})
    (_, refused), *_ = ask(table, "a", "add", "t", 1)
    assert "t is not a counter" in refused.message
    ask(table, "a", "set", {"full": b"%d" % (2**63 - 1)})
    (_, refused), *_ = ask(table, "a", "add", "full", 1)
    assert "64 bits" in refused.message
    assert get(table, "a", "full", "t") == [("a", protocol.Result(1, [b"%d" % (2**63 - 1), b"text"]))]


def test_what_is_appended_is_numbered_and_wakes_who_waits_for_it(table):
    get(table, "a", "list/1")
    assert ask(table, "b", "append", "list", b"first", "") == done("b")
    assert ("a", protocol.Result(1, [b"second"])) in ask(table, "b", "append", "list", b"second", "")
    assert get(table, "b", "list/0", "list") == [("b", protocol.Result(1, [b"first", b"2"]))]
    assert ask(table, "b", "num_keys") == [("b", protocol.Result(1, 3))]


def test_what_is_appended_once_is_not_appended_again(table):
    for asked in ("x", "y", "x", ""):
        ask(table, "a", "append", "list", asked.encode(), asked and f"asked/{asked}")
    assert get(table, "b", "list", "list/2") == [("b", protocol.Result(1, [b"3", b""]))]
    assert ask(table, "b", "delete_prefix", "asked/") == [("b", protocol.Result(1, 2))]
    assert ask(table, "b", "num_keys") == [("b", protocol.Result(1, 4))]


def test_a_gather_lets_all_through_in_one_moment_and_is_forgotten(table):
    assert gather(table, "b", 1, data=b"B") == []
    everyone = protocol.Result(1, [b"A", b"B"])
    assert sorted(gather(table, "a", 0, data=b"A")) == [("a", everyone), ("b", everyone)]
    assert table.store.empty
    assert table.quota.stored_bytes == table.quota.names == 0
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
    assert table.store.empty  # all know it
    assert table.quota.names == 0


def test_a_place_in_a_gather_is_taken_once(table):
    gather(table, "a", 0, data=b"first")
    ((member, refused),) = gather(table, "b", 0, data=b"second")
    assert (member, "has already sent its data" in refused.message) == ("b", True)
    assert ("a", protocol.Result(1, [b"first", b"other"])) in gather(table, "b", 1, data=b"other")


@pytest.mark.parametrize(("index", "size"), [(2, 2), (-1, 2), (0, 0), (0, 3)])
def test_a_gather_that_others_mean_differently_is_refused(table, index, size):
    gather(table, "a", 1)
    ((_, refused),) = gather(table, "b", index, size)
    assert isinstance(refused, protocol.Refused)
    assert "gather g" in refused.message


def test_who_goes_was_not_there(table):
    gather(table, "a", 0, size=3, data=b"A")
    gather(table, "b", 1, size=3, data=b"B")
    table.store.disconnected(table.client("a"))
    gather(table, "c", 2, size=3)
    assert sorted(later(table, 10.0)) == [("b", protocol.TimedOut(1, (0,))), ("c", protocol.TimedOut(1, (0,)))]
    gather(table, "a", 0, size=3)
    assert table.quota.stored_bytes == 0


def test_an_abort_ends_what_waits_in_the_scope_and_nothing_else(table):
    for scope in ("s", "t"):
        ask(table, "f", "enter", scope, "f", "")
    get(table, "a", "x", scope="s")
    get(table, "b", "x", scope="t")
    gather(table, "c", 0, scope="s")
    assert sorted(ask(table, "d", "cancel", "s", "why")) == [
        ("a", protocol.Cancelled(1, "why")),
        ("c", protocol.Cancelled(1, "why")),
        *done("d"),
    ]
    assert ask(table, "d", "cancel", "s", "another reason") == done("d")
    given_up = [("e", protocol.Cancelled(1, "why"))]
    assert get(table, "e", "x", scope="s") == given_up
    assert gather(table, "e", 1, scope="s") == given_up
    assert ask(table, "e", "enter", "s", "e", "") == given_up
    assert ask(table, "e", "watch", "s") == [("e", protocol.Event("s", "why")), *done("e")]
    ask(table, "d", "delete_scope", "s")
    assert ask(table, "e", "enter", "s", "e", "") == done("e")
    assert ("b", protocol.Result(1, [b""])) in ask(table, "d", "set", {"x": b""})


def test_the_end_of_a_scope_is_the_end_of_those_in_it_and_not_the_other_way_round(table):
    for member, scope in (("a", "s"), ("b", "s/0"), ("c", "s/1"), ("d", "s1")):
        ask(table, "h", "enter", scope, "h", "")
        get(table, member, "x", scope=scope)
    ask(table, "e", "watch", "s/1")
    assert ask(table, "f", "cancel", "s/0", "first") == [("b", protocol.Cancelled(1, "first")), *done("f")]
    assert sorted(ask(table, "f", "cancel", "s", "why")) == [
        ("a", protocol.Cancelled(1, "why")),
        ("c", protocol.Cancelled(1, "why")),
        ("e", protocol.Event("s/1", "why")),
        *done("f"),
    ]
    assert ask(table, "g", "enter", "s/0", "g", "") == [("g", protocol.Cancelled(1, "first"))]
    assert ask(table, "g", "enter", "s/2", "g", "") == [("g", protocol.Cancelled(1, "why"))]
    ask(table, "f", "delete_scope", "s")
    assert ask(table, "g", "enter", "s/0", "g", "") == done("g")


def test_a_scopes_keys_are_deleted_with_it_and_no_others(table):
    ask(table, "a", "enter", "s/1", "a", "")
    ask(table, "a", "set", {"s/1": b"", "s/1/x": b"1", "s/1/0/y": b"2", "s/10/x": b"3"})
    gather(table, "a", 0, scope="s/1")
    later(table, 10.0)
    ask(table, "a", "delete_scope", "s/1")
    assert ask(table, "a", "exists", ("s/1", "s/1/x", "s/1/0/y", "s/10/x")) == [
        ("a", protocol.Result(1, [True, False, False, True]))
    ]
    assert table.quota.names == 2, "nor is the late all-gather kept"


def test_nobody_waits_in_a_scope_that_is_gone(table):
    """A rank that was stopped wakes in an update that the others have deleted since."""
    ended = [("b", protocol.Cancelled(1, ENDED.format("s")))]
    ask(table, "b", "enter", "s/0", "b", "")
    get(table, "b", "x", scope="s/0")
    assert ask(table, "a", "delete_scope", "s") == ended + done("a")
    late = [("b", protocol.Cancelled(1, ENDED.format("s/0")))]
    assert get(table, "b", "x", scope="s/0") == late
    assert gather(table, "b", 0, scope="s/0") == late
    assert table.store.empty


def test_a_scope_that_all_left_is_not_kept(table):
    ask(table, "a", "enter", "s", "rank a", "")
    ask(table, "b", "watch", "s")
    ask(table, "a", "leave", "s")
    assert table.quota.names == 1
    ask(table, "b", "leave", "s")
    assert table.store.empty
    assert table.quota.names == 0


def test_the_end_leaves_nothing_and_answers_only_who_asked_for_it(table):
    ask(table, "a", "set", {"x": b"1"})
    ask(table, "a", "enter", "s", "rank a", "")
    ask(table, "a", "end_scope", "t/1")
    get(table, "a", "y")
    get(table, "b", "y")
    gather(table, "a", 0, size=3)
    gather(table, "b", 1, size=3)
    table.sent.clear()
    table.store.end(table.client("a"))
    assert table.sent == [("a", protocol.Cancelled(1, "the session has ended"))] * 2
    assert table.store.empty
    assert table.quota.stored_bytes == table.quota.names == 0
    assert later(table, 1e6) == []


def test_the_budget_is_kept_and_given_back(table):
    assert ask(table, "a", "set", {"x": bytes(900_000)}) == done("a")
    refusals = [
        ask(table, "b", "set", {"y": bytes(100_000)}),
        ask(table, "b", "append", "list", bytes(100_000), ""),
        gather(table, "b", 0, data=bytes(100_000)),
    ]
    for ((member, refused),) in refusals:
        assert (member, "its limit is 1000000 bytes" in refused.message) == ("b", True)
    assert get(table, "b", "list") == [("b", protocol.Result(1, [b"0"]))], "the next is list/0"
    assert ask(table, "b", "num_keys") == [("b", protocol.Result(1, 2))]  # x, and an empty list's count
    ask(table, "a", "set", {"x": b""})
    assert ask(table, "b", "set", {"y": bytes(100_000)}) == done("b")
    ask(table, "b", "delete_keys", ("x", "y", "list"))
    assert table.quota.stored_bytes == table.quota.names == 0


def test_names_are_bounded_in_number_and_length(table):
    table.quota._max_names = 3
    assert ask(table, "a", "set", dict.fromkeys("xyz", b"")) == done("a")
    for kind, fields in (("set", ({"v": b""},)), ("enter", ("s", "who", "")), ("add", ("n", 1))):
        ((_, refused),) = ask(table, "a", kind, *fields)
        assert "3 names" in refused.message
    long = "x" * (MAX_NAME_CHARACTERS + 1)
    for kind, fields in (
        ("set", ({long: b""},)),
        ("get", ((long,), 1.0, "", True)),
        ("get", (("k",), 1.0, long, False)),
        ("all_gather", (long, 0, 2, b"", 1.0, "", "")),
        ("enter", (long, "who", "")),
        ("compare_set", (long, b"", b"")),
    ):
        ((_, refused),) = ask(table, "a", kind, *fields)
        assert f"the limit is {MAX_NAME_CHARACTERS}" in refused.message


def test_waits_are_bounded(table):
    for _ in range(MAX_WAITS):
        assert get(table, "a", "x") == []
    ((_, refused),) = get(table, "a", "x")
    assert "waits" in refused.message
    assert get(table, "b", "x") == []
    ask(table, "b", "set", {"x": b""})
    assert get(table, "a", "y") == []


def test_answers_are_bounded(table, monkeypatch):
    monkeypatch.setattr(store, "MAX_FRAME_BYTES", 1000)
    ask(table, "a", "set", {"x": bytes(600), "y": bytes(600)})
    assert isinstance(get(table, "a", "x")[0][1], protocol.Result)
    ((_, refused),) = get(table, "a", "x", "y")
    assert "request fewer keys" in refused.message
    gather(table, "a", 0, data=bytes(600))
    ((_, refused),) = gather(table, "b", 1, data=bytes(600))
    assert "1000 bytes" in refused.message


def test_timers_of_waits_that_have_ended_are_cancelled(table):
    get(table, "a", "x")
    gather(table, "a", 0)
    gather(table, "b", 0, size=3, name="h")
    ask(table, "b", "set", {"x": b""})
    gather(table, "b", 1)
    table.store.disconnected(table.client("b"))
    assert len(table.timers) == 4
    assert all(timer.cancelled for timer in table.timers)


def test_a_number_that_has_ended_does_not_come_again(table):
    ask(table, "t", "enter", "s/7", "t", "")
    ask(table, "a", "enter", "s/7/0", "a", "s/7")
    ask(table, "t", "set", {})
    assert get(table, "t", "k", scope="s/7") == []
    assert get(table, "a", "k", scope="s/7/0") == []
    assert ask(table, "t", "end_scope", "s/7")[0] == ("a", protocol.Cancelled(1, ENDED.format("s/7")))
    assert ask(table, "t", "set", {"k": b"v"})[0] == ("t", protocol.Result(1, [b"v"])), "the trainer's wait goes on"
    for scope in ("s/7", "s/7/1", "s/6", "s/6/0"):
        assert "has ended" in ask(table, "c", "watch", scope)[0][1].reason
        assert "has ended" in ask(table, "b", "enter", scope, "b", "")[0][1].reason
    assert ask(table, "b", "enter", "s/8", "b", "") == done("b")
    assert get(table, "c", "k2", scope="s/7") == [], "its own members may wait"
    assert "has ended" in get(table, "a", "k2", scope="s/7/1")[0][1].reason, "nobody has entered this one"


def test_nothing_is_revoked_of_which_nothing_is_known(table):
    assert ask(table, "a", "revoke", "s/7", "why") == [("a", protocol.Cancelled(1, ENDED.format("s/7")))]
    assert table.store.empty
    ask(table, "b", "enter", "s", "b", "")
    assert ask(table, "a", "revoke", "s/7", "why")[-1] == ("a", protocol.Result(1, [b"", b"why", b"0"])), "it is in one"


def test_who_is_lost_is_in_no_scope_and_its_scopes_are_given_back(table):
    ask(table, "a", "enter", "s", "rank a", "")
    ask(table, "a", "watch", "t")
    table.store.disconnected(table.client("a"))
    assert "rank a disconnected" in ask(table, "b", "enter", "s", "b", "")[0][1].reason
    ask(table, "b", "delete_scope", "s")
    assert table.store.empty
    assert table.quota.names == 0
