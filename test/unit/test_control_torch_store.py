"""Process groups of torch rendezvous over a control server."""

import gc
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from sglang_reshard.control import ControlClient
from sglang_reshard.control.torch_store import ControlStore
from sglang_reshard.errors import Aborted, ConnectionLost
from sglang_reshard.protocol.session import Session

SOON_S = 180.0  # three processes import torch


@pytest.fixture
def client(control_server):
    with ControlClient(control_server.address, SOON_S) as client:
        yield client


@pytest.mark.parametrize("prefixed", [False, True])
def test_it_is_what_torch_means_by_a_store(client, prefixed):
    """Called from Python, and from torch's own code, which a PrefixStore is."""
    store = ControlStore(client, 1.0)
    if prefixed:
        store = dist.PrefixStore("prefix", store)
    store.set("a", "text")
    assert store.get("a") == b"text"
    assert store.add("n", 2) == 2
    assert store.add("n", 3) == 5
    assert store.check(["a", "n"])
    assert not store.check(["a", "z"])
    assert store.compare_set("c", "", "1") == b"1"
    assert store.compare_set("c", "2", "3") == b"1"
    assert store.compare_set("c", "1", "3") == b"3"
    store.wait(["a", "c"])
    store.wait(["a", "c"], timedelta(seconds=1))
    assert store.delete_key("a")
    assert not store.delete_key("a")
    assert store.num_keys() == client.num_keys() == 2
    assert client.exists(["prefix/n" if prefixed else "n"]) == [True]


@pytest.mark.parametrize("prefixed", [False, True])
def test_a_wait_that_ends_with_nothing_is_the_error_that_torch_knows(client, prefixed):
    store = ControlStore(client, 0.2)
    if prefixed:
        store = dist.PrefixStore("prefix", store)
    for wait in (
        lambda: store.get("z"),
        lambda: store.wait(["z"]),
        lambda: store.wait(["z"], timedelta(seconds=0.1)),
    ):
        with pytest.raises(dist.DistStoreError, match=r"z was not set within 0\.[12] s"):
            wait()
    store.set_timeout(timedelta(seconds=0.5))
    start = time.monotonic()
    with pytest.raises(dist.DistStoreError):
        store.get("z")
    assert time.monotonic() - start >= 0.5


def test_an_abort_and_a_loss_come_through_torch(control_server, client):
    client.enter("s", "rank a")
    store = dist.PrefixStore("prefix", ControlStore(client, SOON_S, scope="s"))
    threading.Timer(0.2, client.cancel, ("s", "why")).start()
    with pytest.raises(Aborted, match=r"^why$"):
        store.get("z")
    threading.Timer(0.2, control_server.close).start()
    with pytest.raises(ConnectionLost):
        dist.PrefixStore("prefix", ControlStore(client, SOON_S)).wait(["z"], timedelta(seconds=SOON_S))


def test_a_session_keeps_one_store_for_an_engine_and_bounds_its_waits_anew(client):
    session = Session(client)
    first = session.store(0, SOON_S, "1/0")
    for update in range(2, 10):
        session.store(0, SOON_S, f"{update}/0")
    assert [thing for thing in gc.get_objects() if type(thing) is ControlStore and thing._client is client] == [
        session._stores[0]
    ]
    client.enter("9/0", "rank a")
    threading.Timer(0.2, client.cancel, ("9/0", "why")).start()
    with pytest.raises(Aborted, match=r"^why$"):
        first.get("z")
    session.store(1, 0.1, "")
    session.store(0, 0.2, "")
    with pytest.raises(dist.DistStoreError, match=r"z was not set within 0\.2 s"):
        first.get("z")
