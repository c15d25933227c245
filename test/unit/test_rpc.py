"""A call of all schedulers reaches the one that passes it on, whichever leader the socket favours."""

import threading

import pytest

from sglang_reshard.errors import DeadlineExceeded
from sglang_reshard.patches.rpc import ask

zmq = pytest.importorskip("zmq")


def leader(context, address, started, mine, others, first):
    """Answers what the first leader got; what another leader gets itself, it drops, as SGLang does."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    started.wait()
    received = socket.recv_pyobj() if socket.poll(5000) else None
    if first and received is not None:
        for other in others:
            other.set()
    if mine.wait(5):
        socket.send_pyobj("done")
    socket.close()


@pytest.fixture
def context():
    made = zmq.Context()
    yield made
    made.term()


@pytest.mark.parametrize("first", [0, 1])
def test_every_leader_answers_whoever_is_first(context, first, tmp_path):
    address = f"ipc://{tmp_path / 'rpc'}"
    engine = context.socket(zmq.DEALER)
    monitor = engine.get_monitor_socket(zmq.EVENT_ACCEPTED)
    engine.bind(address)
    started, passed_on = threading.Event(), [threading.Event(), threading.Event()]
    threads = [
        threading.Thread(target=leader, args=(context, address, started, passed_on[i], passed_on, i == first))
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
        assert monitor.poll(5000)
        monitor.recv_multipart()
    started.set()
    try:
        assert ask(engine, "a message", 2, 5.0) == ["done", "done"]
        assert not engine.poll(0)
    finally:
        for thread in threads:
            thread.join()
        engine.disable_monitor()
        monitor.close()
        engine.close(linger=0)


def test_schedulers_that_are_not_there_are_not_awaited_for_ever(context, tmp_path):
    engine = context.socket(zmq.DEALER)
    engine.bind(f"ipc://{tmp_path / 'rpc'}")
    try:
        with pytest.raises(DeadlineExceeded, match="0 of 1 schedulers"):
            ask(engine, "a message", 1, 0.05)
    finally:
        engine.close(linger=0)


def test_a_leader_that_got_it_and_says_nothing_is_not_awaited_for_ever(context, tmp_path):
    engine, silent = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    engine.bind(f"ipc://{tmp_path / 'rpc'}")
    silent.connect(f"ipc://{tmp_path / 'rpc'}")
    try:
        with pytest.raises(DeadlineExceeded, match="0 of 1 schedulers"):
            ask(engine, "a message", 1, 0.5)
        assert silent.recv_pyobj() == "a message"
    finally:
        silent.close(linger=0)
        engine.close(linger=0)
