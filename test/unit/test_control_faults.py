"""Processes that are killed, stopped or forked: everyone else hears of it, in time."""

import os
import queue
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from subprocess import PIPE, Popen

import msgspec
import pytest

from sglang_reshard.control import Address, ControlClient, ControlServer, WaitTimedOut
from sglang_reshard.control import client as client_module
from sglang_reshard.control.connection import configure, silence
from sglang_reshard.errors import Aborted, ConnectionLost, DeadlineExceeded
from support.ready import CONTEXT

SOON_S = 60.0
AT_ONCE_S = 15.0
WATCHERS = 200


@contextmanager
def process(function, *arguments):
    """One that runs `function(pipe, *arguments)`, and the other end of its pipe."""
    pipe, theirs = CONTEXT.Pipe()
    child = CONTEXT.Process(target=function, args=(theirs, *arguments), daemon=True)
    child.start()
    try:
        yield child, pipe
    finally:
        child.kill()
        child.join()
        pipe.close()
        theirs.close()


KEEPS_SERVER_UNTIL_CANCELLED = """
import msgspec, threading
from sglang_reshard.control import ControlClient, ControlServer
server = ControlServer.open()
heard = threading.Event()
ControlClient(server.address, 60.0).watch("s", lambda reason: heard.set())
print(msgspec.json.encode(server.address).decode(), flush=True)
heard.wait()
"""


def said(pipe):
    assert pipe.poll(SOON_S)
    return pipe.recv()


def keep_server(pipe):
    control_server = ControlServer.open()
    pipe.send(control_server.address)
    pipe.recv()


def take_part(pipe, address):
    """Enter, and wait for what never comes, until killed."""
    client = ControlClient(address, SOON_S)
    client.enter("s", "engine rank 3 (host h, process 123)")
    pipe.send("in")
    pipe.recv()


def take_part_and_fork(pipe, address):
    client = ControlClient(address, SOON_S)
    client.enter("s", "trainer rank 1 (host h, process 5)")
    if (child := os.fork()) == 0:
        try:
            client.num_keys()
        except ConnectionLost:  # it is the parent's
            time.sleep(SOON_S)
        os._exit(1)
    pipe.send(child)
    pipe.recv()


def test_all_hear_why_although_the_servers_process_ends_as_soon_as_it_has_heard():
    script = [sys.executable, "-c", KEEPS_SERVER_UNTIL_CANCELLED]
    with Popen(script, stdout=PIPE, text=True) as keeper, ExitStack() as clients:
        clients.callback(keeper.kill)
        address, reasons = msgspec.json.decode(keeper.stdout.readline(), type=Address), queue.SimpleQueue()
        for _ in range(WATCHERS):
            clients.enter_context(ControlClient(address, SOON_S)).watch("s", reasons.put)
        with process(take_part, address) as (member, members_pipe):
            assert said(members_pipe) == "in"
            member.kill()
        for _ in range(WATCHERS):
            reason = reasons.get(timeout=AT_ONCE_S)
            assert reason.startswith("engine rank 3 (host h, process 123) disconnected unexpectedly; ")
            assert "Check its log" in reason


def test_a_child_that_a_member_forked_does_not_keep_its_connection(control_server):
    with (
        process(take_part_and_fork, control_server.address) as (member, pipe),
        ControlClient(control_server.address, SOON_S) as client,
    ):
        child = said(pipe)
        try:
            with ThreadPoolExecutor() as threads:
                waiting = threads.submit(client.get, ["never"], SOON_S, "s")
                time.sleep(0.3)
                os.kill(child, 0)
                assert not waiting.done()
                member.kill()
                with pytest.raises(Aborted, match="trainer rank 1"):
                    waiting.result(AT_ONCE_S)
                os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_server_that_stands_still_is_not_waited_for_for_ever(monkeypatch):
    assert client_module.GRACE_S == 5.0
    monkeypatch.setattr(client_module, "GRACE_S", 0.5)
    with process(keep_server) as (keeper, pipe):
        address = said(pipe)
        client, quick, lost = ControlClient(address, 1.0), ControlClient(address, 0.7), threading.Event()
        client.watch("t", lambda _: lost.set())
        os.kill(keeper.pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"it did not answer within 1\.5 s"):
            client.get(["x"], 1.0)
        assert 1.5 <= time.monotonic() - start < AT_ONCE_S
        assert lost.wait(AT_ONCE_S)
        start = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"it did not answer within 0\.7 s"):
            quick.set({"x": b""})
        with pytest.raises(DeadlineExceeded, match=r"trainer rank 0 at 127\.0\.0\.1:\d+ did not answer within 0\.7 s"):
            ControlClient(address, 0.7)
        assert time.monotonic() - start < AT_ONCE_S
        for each in (client, quick):
            each.close()


def test_a_server_that_is_stopped_for_less_than_the_deadline_is_waited_for(monkeypatch):
    monkeypatch.setattr(client_module, "GRACE_S", 0.5)
    with process(keep_server) as (keeper, pipe):
        client = ControlClient(said(pipe), SOON_S)
        os.kill(keeper.pid, signal.SIGSTOP)
        threading.Timer(2.0, os.kill, (keeper.pid, signal.SIGCONT)).start()
        with pytest.raises(WaitTimedOut):
            client.get(["x"], 0.1)
        client.set({"x": b"1"})
        assert client.get(["x"], 0.1) == [b"1"]
        client.close()


def test_a_stopped_server_does_not_block_who_has_much_to_say():
    with process(keep_server) as (keeper, pipe):
        client = ControlClient(said(pipe), 0.7)
        os.kill(keeper.pid, signal.SIGSTOP)
        with pytest.raises(ConnectionLost, match="sending to it failed"):
            client.set({"x": bytes(64 << 20)})  # more than the connection takes on its way
        client.close()


def test_a_process_that_does_not_read_is_not_silent():
    """By the kernel's own word: its host acknowledges what it does not read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = configure(socket.create_connection(server.getsockname()))
        theirs, _ = server.accept()
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16))
        assert not silence(ours)
        ours.close()
        theirs.close()
