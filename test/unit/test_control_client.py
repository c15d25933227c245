"""Clients of one control server, in threads of one process."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from queue import SimpleQueue

import pytest

from sglang_reshard.control import ControlClient, ControlServer, WaitTimedOut, server
from sglang_reshard.control.connection import connect
from sglang_reshard.errors import Aborted, ConnectionLost, DeadlineExceeded, ReshardError, Unsupported

SOON_S = 60.0


@pytest.fixture
def clients(control_server):
    """Three clients of one session."""
    with ExitStack() as stack:
        yield [stack.enter_context(ControlClient(control_server.address, SOON_S)) for _ in range(3)]


@pytest.fixture
def threads():
    with ThreadPoolExecutor(32) as pool:
        yield pool


def deadline():
    return time.monotonic() + SOON_S


def census():
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def settles(reading, expected):
    end = deadline()
    while (found := reading()) != expected and time.monotonic() < end:
        time.sleep(0.01)
    assert found == expected


@pytest.mark.parametrize("interface", ["0.0.0.0", "0", "", "::", "::0"])
def test_a_server_does_not_announce_an_address_that_nobody_can_connect_to(interface):
    before = census()
    with pytest.raises(Unsupported, match="means all interfaces of this host"):
        ControlServer.open(interface)
    settles(census, before)


def test_sessions_of_a_server_are_apart(control_server, clients):
    with ControlClient(control_server.address.named("other"), SOON_S) as other:
        clients[0].set({"x": b"1"})
        assert other.exists(["x"]) == [False]
        other.cancel("s", "of the other session")
        clients[0].enter("s", "rank 0")
        with pytest.raises(WaitTimedOut):
            other.all_gather("g", 0, 2, b"", 0.0)
        assert other.num_keys() == 0


@pytest.mark.parametrize("timeout_s", [1e9, float("inf")])
def test_a_wait_may_be_as_long_as_one_likes(clients, threads, timeout_s):
    waiting = threads.submit(clients[0].get, ["x"], timeout_s)
    with pytest.raises(WaitTimedOut):
        clients[1].get(["y"], 0.2)
    clients[1].set({"x": b"1"})
    assert waiting.result(SOON_S) == [b"1"]


def test_who_left_does_not_hear_and_does_not_abort(control_server, clients):
    a, b, _ = clients
    heard = []
    other = ControlClient(control_server.address, SOON_S)
    other.enter("s", "rank 7")
    other.leave("s")
    other._socket.shutdown(2)
    a.enter("s", "rank 0")
    a.watch("s", heard.append)
    a.leave("s")
    b.enter("s", "rank 1")  # not aborted
    b.cancel("s", "why")
    a.num_keys()
    lost = threading.Event()
    a.watch("t", lambda _: lost.set())
    a._socket.shutdown(2)
    assert lost.wait(SOON_S)
    time.sleep(0.05)
    assert heard == []
    other.close()


def test_a_watcher_that_is_forgotten_leaves_others_of_the_scope(clients):
    a, b, _ = clients
    heard, forgotten = [], []
    a.watch("s", forgotten.append)
    a.watch("s", heard.append)
    a.unwatch("s", forgotten.append)  # an equal bound method
    b.cancel("s", "why")
    settles(lambda: heard, ["why"])
    a.watch("t", forgotten.append)
    a.unwatch("t", forgotten.append)
    assert a._callbacks == {}
    b.cancel("t", "why")
    assert a.exists(["x"]) == [False]  # by now the event has come
    assert forgotten == []


def test_a_callback_may_use_the_client(clients):
    a, b, _ = clients
    found = []
    a.set({"x": b"1"})
    a.watch("s", lambda reason: found.extend(a.get(["x"], SOON_S)))
    b.cancel("s", "why")
    settles(lambda: found, [b"1"])


def test_a_client_that_breaks_fails_at_once_and_everyone_hears_who_it_was(clients, threads):
    a, b, _ = clients
    heard, lost = [], threading.Event()
    a.enter("s", "engine rank 3 (host h, process 123)")
    a.watch("s", heard.append)
    a.watch("t", lambda _: lost.set())
    own = threads.submit(a.get, ["x"], SOON_S)
    other = threads.submit(b.get, ["x"], SOON_S, "s")
    time.sleep(0.1)
    a._socket.shutdown(2)
    with pytest.raises(ConnectionLost):
        own.result(SOON_S)
    with pytest.raises(Aborted, match=r"^engine rank 3 \(host h, process 123\) disconnected unexpectedly;"):
        other.result(SOON_S)
    assert lost.wait(SOON_S)
    settles(lambda: len(heard), 1)
    assert "can no longer be reached" in heard[0]
    late = []
    a.watch("t", late.append)
    settles(lambda: late, heard)
    for use in (a.num_keys, lambda: a.set({"x": b""}), lambda: a.enter("s", "me")):
        with pytest.raises(ConnectionLost):
            use()


def test_the_end_of_a_session_is_heard_by_its_other_clients_only(control_server, clients, threads):
    a, b, c = clients
    heard = []
    with ControlClient(control_server.address.named("other"), SOON_S) as other:
        for name, client in zip("abco", (*clients, other), strict=True):
            client.watch("t", lambda _, name=name: heard.append(name))
        b.enter("s", "rank 1")
        other.set({"x": b"1"})
        a.set({"x": b"1"})
        waiting = threads.submit(c.get, ["y"], SOON_S)
        time.sleep(0.1)
        a.enter("s", "rank 0")
        a.end_session()
        with pytest.raises(ConnectionLost, match="rank 0 ended the session"):
            waiting.result(SOON_S)
        settles(lambda: sorted(heard), ["b", "c"])
        assert a.num_keys() == 0
        assert other.num_keys() == 1
    assert len(heard) == 2


def test_who_closes_a_client_does_not_hear_of_its_loss_and_others_do_not_either(control_server, threads):
    heard = []
    a, b = ControlClient(control_server.address, SOON_S), ControlClient(control_server.address, SOON_S)
    a.enter("s", "rank 0")
    b.enter("s", "rank 1")
    b.watch("s", heard.append)
    a.watch("s", heard.append)
    waiting = threads.submit(a.get, ["x"], SOON_S)
    time.sleep(0.1)
    a.close()
    a.close()
    with pytest.raises(ConnectionLost, match="this connection to the control server is closed"):
        waiting.result(SOON_S)
    with pytest.raises(ConnectionLost):
        a.num_keys()
    b.get([], 0.0, "s")
    b.close()
    time.sleep(0.1)
    assert heard == []


def test_the_end_of_the_server_is_heard_by_all(control_server, clients, threads):
    lost = [threading.Event() for _ in clients]
    for client, event in zip(clients, lost, strict=True):
        client.watch("t", lambda _, event=event: event.set())
    waiting = [threads.submit(client.get, ["x"], SOON_S) for client in clients]
    time.sleep(0.1)
    control_server.close()
    control_server.close()
    for w in waiting:
        with pytest.raises(ConnectionLost, match="trainer rank 0"):
            w.result(SOON_S)
    assert all(event.wait(SOON_S) for event in lost)
    with pytest.raises(DeadlineExceeded, match="control server of trainer rank 0 at"):
        ControlClient(control_server.address, 1.0)


def test_an_address_of_any_kind(threads):
    control_server = ControlServer.open("::1")
    try:
        with ControlClient(control_server.address, SOON_S) as client:
            client.set({"x": b"1"})
    finally:
        control_server.close()
    with pytest.raises(OSError, match="assign"):
        ControlServer.open("192.0.2.1")


def test_what_is_too_much_is_refused_and_the_client_goes_on(control_server, clients, monkeypatch):
    a = clients[0]
    with pytest.raises(ReshardError, match="has 5000 characters"):
        a.set({"x" * 5000: b""})
    monkeypatch.setattr("sglang_reshard.control.connection.MAX_FRAME_BYTES", 10_000)
    with pytest.raises(ReshardError, match="limit of 10000"):
        a.set({"x": bytes(20_000)})
    with pytest.raises(ReshardError, match="characters; the limit is"):
        ControlClient(control_server.address.named("x" * 5000), SOON_S)
    a.set({"x": bytes(5000)})
    assert a.num_keys() == 1


def test_frames_that_are_never_finished_count_for_all_that_is_stored(told):
    host = ControlServer.open()
    host.quota._max_bytes = 1 << 20
    with ControlClient(host.address, SOON_S) as good:
        halves = [ControlClient(host.address, SOON_S) for _ in range(4)]
        for client in halves:
            frame = client._writer.frame((1, "set", ({"x": bytes(500_000)},)))
            with suppress(OSError):
                client._socket.sendall(frame[:-1])
        settles(lambda: [client.is_lost for client in halves].count(True) >= 2, True)
        assert "sends incomplete frames or does not read its replies" in told.text
        for client in halves:
            client.close()
        settles(lambda: host.quota.stored_bytes, 0)
        good.set({"x": bytes(900_000)})
    host.close()


def test_replies_that_were_read_do_not_count_and_of_others_the_rest_does(told):
    """Clients that are idle after they have read 20 MB each, of a server that may hold 50 MB."""
    host = ControlServer.open()
    host.quota._max_bytes = 50 << 20
    with ControlClient(host.address, SOON_S) as publisher, ExitStack() as stack:
        publisher.set({"big": bytes(20_000_000)})
        idle = [stack.enter_context(ControlClient(host.address, SOON_S)) for _ in range(4)]
        for client in idle:
            assert len(client.get(["big"], SOON_S)[0]) == 20_000_000
        settles(lambda: host.quota.stored_bytes, 20_000_000 + len("big") + 256)
        sock, writer, _ = connect(host.address, SOON_S)
        sock.sendall(writer.frame((1, "get", (("big",), SOON_S, "", True))))
        settles(lambda: host.quota.stored_bytes > 30_000_000, True)
        left = 19_000_000
        while left > 0:  # it has not read all of its reply, and does not go on
            left -= len(sock.recv(left))
        publisher.set({"more": bytes(25_000_000)})
        sock.close()
    assert "store is full" not in told.text
    host.close()


def test_who_does_not_read_its_replies_is_dropped(control_server, clients, monkeypatch, told):
    monkeypatch.setattr(server, "MAX_UNSENT_BYTES", 4 << 20)
    lazy, other, _ = clients
    lazy.set({"x": bytes(1 << 20)})
    stuck = threading.Event()
    lazy._reader.feed = lambda piece: stuck.wait(SOON_S) and []
    asked = [lazy._writer.frame((n, "get", (("x",), 1.0, "", True))) for n in range(100, 1000)]

    def ask_on():
        for frame in asked:
            lazy._socket.sendall(frame)
            time.sleep(0.001)

    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        ask_on()
    stuck.set()
    assert "does not read its replies" in told.text
    assert other.get(["x"], SOON_S) == [bytes(1 << 20)]


def test_what_is_posted_is_done_in_order_and_not_waited_for(control_server):
    with ControlClient(control_server.address, 10) as a, ControlClient(control_server.address, 10) as b:
        a.enter("s", "rank 0")
        a.set({"s/in": b"1"}, wait=False)
        told = SimpleQueue()
        b.watch("s", told.put)
        b.cancel("s", "why")
        assert told.get(timeout=10) == "why"
        a.enter("s", "rank 0")  # it is cancelled: the next wait says so
        with pytest.raises(Aborted, match="why"):
            a.get(["never"], 10, "s")
        late = SimpleQueue()
        a.watch("s", late.put)
        assert late.get(timeout=10) == "why"
        a.leave("s")
        a.delete_scope("s")
        assert a.num_keys() == 0
        a.enter("s", "rank 0")
        assert a.get([], 10, "s") == []


def test_a_posted_request_that_is_refused_ends_the_connection(control_server):
    client = ControlClient(control_server.address, 10)
    lost = SimpleQueue()
    client.watch("t", lambda _: lost.put("lost"))
    client.enter("x" * 100_000, "rank 0")
    assert lost.get(timeout=10) == "lost"
    with pytest.raises(ConnectionLost):
        client.num_keys()
    client.close()
