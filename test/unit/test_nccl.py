"""NCCL groups end no process, change no environment, and block nothing that a deadline or an abort does not end.

Calls that keep the interpreter's lock are not made: `FakeNccl` has none.
"""

import os
import threading
import time
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from sglang_reshard.errors import DeadlineExceeded, PeerDisconnected
from sglang_reshard.gpu import runtime as gpu
from sglang_reshard.routes.wire import concurrent_use
from sglang_reshard.routes.wire import nccl as nccl_module
from sglang_reshard.routes.wire.communicator import Communicator, Communicators
from sglang_reshard.routes.wire.ctas import CtaShares
from sglang_reshard.routes.wire.nccl import changed_environment
from sglang_reshard.routes.wire.recorded_works import recorder_entries
from support.gpu_runtime import replaced_runtime

GPU = torch.device("meta")  # memory that is not the host's
DATA = torch.zeros(8, dtype=torch.uint8)
OPTIONS = {"members": [0, 1], "trainer_ranks": 1, "backend": "nccl", "device": GPU, "timeout_s": 0.5}
LATE_S = 15.0  # of a busy host, beside the second of grace


class FakeWork:
    def __init__(self, pg):
        self.pg = pg

    def wait(self, timeout):
        """As the group's waits block, it returns when the kernel ends, of an aborted operation as well."""
        assert timeout.total_seconds() > OPTIONS["timeout_s"], "torch would abort the communicator before the deadline"
        self.pg.waiting.append(threading.get_ident())
        while not (self.pg.finished.is_set() or self.pg.aborted.is_set()):
            time.sleep(0.001)
        if self.pg.error:
            raise RuntimeError(self.pg.error)


class FinishedWork(FakeWork):
    """Of the message that a rank sends to itself."""

    def wait(self, timeout):
        assert timeout.total_seconds() > 0


class FakeNccl:
    """torch's ProcessGroupNCCL as far as it is used. Blocks where that does, and in threads that may be left behind."""

    made: ClassVar[list["FakeNccl"]] = []
    fails = ""  # the call that raises

    def __init__(self, store, rank, size, options):
        self.environment, self.options = dict(os.environ), options
        self.connected, self.finished, self.aborted = (threading.Event() for _ in range(3))
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.error, self.calls, self.environments, self.waiting = "", [], {}, []
        FakeNccl.made.append(self)
        time.sleep(0.01)
        self.note("made")

    def note(self, name):
        self.calls.append((name, threading.get_ident()))
        self.environments[name] = dict(os.environ)
        if FakeNccl.fails == name:
            raise RuntimeError(f"{name} failed")

    def eager_connect_single_device(self, device):
        self.note("eager")

    def _start_coalescing(self):
        self.note("start")

    def send(self, tensors, peer, tag):
        self.note("send")

    def recv(self, tensors, peer, tag):
        self.note("recv")

    def _end_coalescing(self):
        if "ready" not in dict(self.calls):
            while not self.connected.wait(0.01):  # not ended by `abort`, which waits for it
                pass
            self.note("ready")
            return FinishedWork(self)
        self.note("end")
        return FakeWork(self)

    def broadcast(self, tensors, options):
        self.note("broadcast")

    def abort(self):
        self.note("abort")
        self.aborted.set()
        self.may_abort.wait(20)


class OneGpu(gpu.CudaRuntime):
    """Says that `GPU` is one."""

    def is_gpu(self, device):
        return device == GPU

    def adopt_stream(self, device):
        return lambda: None

    def waiting_stream(self, device):
        return nullcontext()

    def multiprocessors(self, device):
        return 132


@pytest.fixture(autouse=True)
def nccl(monkeypatch):
    monkeypatch.setattr(FakeNccl, "made", [])
    monkeypatch.setattr(nccl_module, "CTAS", CtaShares())
    monkeypatch.setattr(FakeNccl, "fails", "")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl)
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(blocking=None, max_ctas=None)))
    monkeypatch.setattr(FakeNccl, "Options", options.Options, raising=False)
    with replaced_runtime(OneGpu()):
        yield FakeNccl


def store_with_peers(entered=True, peers=1, ctas=16):
    """A store in which the other members have set what they set."""
    store = dist.HashStore()
    for rank in range(1, peers + 1):
        store.set(f"joined/{rank}", "")
        store.set(f"ctas/{rank}", str(ctas))
        if entered:
            store.add("entered", 1)
    return store


def soon(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def connect_all(count):
    """Lets NCCL connect the groups that are made, in a thread; what is given to the first time is done at once."""

    def run():
        for number in range(count):
            soon(lambda number=number: len(FakeNccl.made) > number)
            FakeNccl.made[number].finished.set()
            FakeNccl.made[number].connected.set()

    threading.Thread(target=run, daemon=True).start()


def connected(ctas=16, **changes):
    """A communicator whose other member does whatever is necessary."""
    communicator = Communicator(peer_id=0, **(OPTIONS | changes))
    threading.Thread(
        target=lambda: (soon(lambda: FakeNccl.made), FakeNccl.made[0].connected.set()), daemon=True
    ).start()
    communicator.connect(store_with_peers(peers=len(changes.get("members", "ab")) - 1, ctas=ctas))
    return communicator, FakeNccl.made[0]


def test_it_is_made_without_a_watchdog_and_does_not_block():
    before = dict(os.environ)
    _, pg = connected()
    assert pg.environment["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert pg.options.config.blocking == 0
    assert pg.options.config.max_ctas == 16
    assert dict(os.environ) == before


@pytest.mark.parametrize(("at_once", "theirs", "expected"), [(8, 16, 16), (9, 16, 14), (1, 5, 5), (200, 16, 1)])
def test_communicators_that_are_used_at_once_share_a_gpu_and_all_members_have_the_least(at_once, theirs, expected):
    communicator, pg = connected(at_once=at_once, ctas=theirs)
    assert pg.options.config.max_ctas == expected
    communicator.close()


def test_a_communicator_that_comes_later_gets_the_room_that_is_left():
    class Owner:
        pass

    others = [Owner() for _ in range(8)]
    device, store = torch.device("meta"), dist.HashStore()
    shares = CtaShares()
    assert [shares.agree(o, device, 1, dist.PrefixStore(str(id(o)), store), 0, 1) for o in others] == [16] * 8
    late, too_late = Owner(), Owner()
    assert shares.agree(late, device, 1, dist.PrefixStore("late", store), 0, 1) == 4
    assert shares.agree(too_late, device, 1, dist.PrefixStore("too late", store), 0, 1) == 1
    shares.release(others[0])
    del others[1:]
    assert shares.agree(Owner(), device, 1, dist.PrefixStore("again", store), 0, 1) == 16


@pytest.mark.parametrize(
    ("environment", "entries"),
    [({}, 2000), ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, 0), ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "many"}, 2000),
     ({"TORCH_FR_BUFFER_SIZE": "30", "TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}, 30)],
)  # fmt: skip
def test_works_are_kept_as_long_as_the_flight_recorder_has_their_events(environment, entries):
    assert recorder_entries(environment) == entries


def test_every_operation_is_kept_for_the_flight_recorder(monkeypatch):
    works = deque()
    monkeypatch.setattr(nccl_module, "RECORDED_WORKS", works)
    communicator, pg = connected()
    pg.finished.set()
    before = len(works)
    for _ in range(3):
        communicator.send([(1, DATA)]).wait()
    assert (before, len(works)) == (1, 4)


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_the_environment_is_as_before_also_when_it_cannot_be_made(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", value)
    before = dict(os.environ)
    monkeypatch.setattr(FakeNccl, "fails", "made")
    with pytest.raises(PeerDisconnected, match="made failed"):
        Communicator(peer_id=0, **OPTIONS).connect(store_with_peers())
    assert dict(os.environ) == before


def test_the_variable_is_set_for_the_constructor_alone():
    """A group that another thread makes while this one is set would have no watchdog."""
    _, pg = connected()
    assert pg.environment["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert {name for name, seen in pg.environments.items() if "TORCH_NCCL_BLOCKING_WAIT" in seen} == {"made"}


def test_threads_change_the_environment_one_after_the_other():
    before, inside, most = dict(os.environ), [], []

    def change(number):
        with changed_environment({"TORCH_NCCL_BLOCKING_WAIT": str(number)}):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.005)
            assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == str(number)
            inside.pop()

    threads = [threading.Thread(target=change, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20
    assert dict(os.environ) == before


def test_a_rank_that_does_not_connect_is_named_at_the_deadline():
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="trainer rank 0 could not connect to engine rank 0 within"):
        Communicator(peer_id=0, **OPTIONS).connect(store_with_peers())
    assert time.monotonic() - begun < OPTIONS["timeout_s"] + LATE_S
    (pg,) = FakeNccl.made
    assert pg.aborted.is_set()


@pytest.mark.parametrize("entered", [True, False])
def test_connecting_ends_when_another_thread_aborts(entered):
    """Both while members come, when NCCL can be aborted, and while torch waits for NCCL, when it cannot."""
    communicator = Communicator(peer_id=0, **(OPTIONS | {"timeout_s": 60}))
    threading.Timer(0.2, communicator.abort).start()
    begun = time.monotonic()
    with pytest.raises(PeerDisconnected, match="trainer rank 0 stopped waiting for engine rank 0"):
        communicator.connect(store_with_peers(entered))
    assert time.monotonic() - begun < LATE_S
    assert FakeNccl.made[0].aborted.is_set()
    with pytest.raises(PeerDisconnected):
        communicator.send([(1, DATA)])


def test_what_was_aborted_before_it_connects_does_not_connect():
    communicator = Communicator(peer_id=0, **OPTIONS)
    communicator.abort()
    with pytest.raises(PeerDisconnected, match="stopped waiting"):
        communicator.connect(store_with_peers())
    soon(lambda: all(pg.aborted.is_set() for pg in FakeNccl.made))


def test_operations_are_started_together_in_a_thread_of_their_own():
    """A failure would leave the thread within NCCL's group: nothing that it starts later would be launched."""
    communicator, pg = connected(members=[0, 1, 2])
    pending = communicator.send([(1, DATA), (2, DATA)])
    started = [call for call in pg.calls if call[0] in ("start", "send", "end")][-4:]
    assert [name for name, _ in started] == ["start", "send", "send", "end"]
    assert len({thread for _, thread in started} - {threading.get_ident()}) == 1
    pg.finished.set()
    pending.wait()
    assert not communicator.pending


def test_a_thread_that_starts_operations_has_the_callers_stream_and_goes_back_to_no_other_gpu(monkeypatch):
    """NCCL waits for the current stream of the thread that starts: on another, the bucket might not be packed yet."""
    told = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device, threading.get_ident()))
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(
            torch.cuda, name, lambda value, name=name: told.append((name, value, threading.get_ident()))
        )
    device = torch.device("cuda", 3)
    adopt = gpu.CudaRuntime().adopt_stream(device)
    thread = threading.Thread(target=adopt)
    thread.start()
    thread.join()
    stream = ("stream of", device, threading.get_ident())
    assert [call[:2] for call in told] == [("set_device", device), ("set_stream", stream)]
    assert {call[2] for call in told} == {thread.ident}


def test_a_failure_to_start_is_an_error_of_this_rank(monkeypatch):
    communicator, _ = connected()
    monkeypatch.setattr(FakeNccl, "fails", "send")
    with pytest.raises(
        PeerDisconnected, match=r"trainer rank 0 could not send a message to engine rank 0: .*send failed"
    ):
        communicator.send([(1, DATA)])


@pytest.mark.parametrize("verb", ["send", "receive"])
def test_a_wait_ends_at_the_deadline_and_names_the_rank(verb):
    communicator, _ = connected()
    pending = getattr(communicator, verb)([(1, DATA)])
    begun = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=f"trainer rank 0 could not {verb} a message (to|from) engine rank 0 within"
    ):
        pending.wait()
    assert time.monotonic() - begun < OPTIONS["timeout_s"] + LATE_S


def test_an_operation_that_failed_is_an_error_of_this_rank_and_the_process_lives():
    communicator, pg = connected()
    pending = communicator.send([(1, DATA)])
    pg.error = "ncclRemoteError"
    pg.finished.set()
    with pytest.raises(PeerDisconnected, match="ncclRemoteError"):
        pending.wait()


def test_an_aborted_operation_has_not_succeeded_though_its_kernel_has_ended():
    communicator, _ = connected(timeout_s=60)
    pending = communicator.receive([(1, DATA)])
    threading.Timer(0.1, communicator.abort).start()
    with pytest.raises(PeerDisconnected, match="aborted"):
        pending.wait()


def test_closing_with_messages_pending_aborts_and_returns_though_nccl_does_not():
    communicator, pg = connected()
    pg.may_abort.clear()
    communicator.send([(1, DATA)])
    begun = time.monotonic()
    communicator.close()
    assert pg.aborted.is_set()
    assert time.monotonic() - begun < LATE_S
    pg.may_abort.set()


def test_closing_without_waits_for_nobody():
    communicator, pg = connected()
    pg.may_abort.clear()
    begun = time.monotonic()
    communicator.close()
    assert time.monotonic() - begun < 0.5
    soon(pg.aborted.is_set)
    pg.may_abort.set()


def test_an_abort_does_not_ask_the_users_groups_to_end_the_process(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_EXTRA_DUMP_ON_EXEC", "1")
    communicator, pg = connected()
    communicator.abort()
    assert pg.environments["abort"]["TORCH_NCCL_EXTRA_DUMP_ON_EXEC"] == "0"
    assert os.environ["TORCH_NCCL_EXTRA_DUMP_ON_EXEC"] == "1"


def test_communicators_beside_nccl_of_the_process_itself_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(concurrent_use, "CTAS", nccl_module.CTAS)
    concurrent_use._warn.cache_clear()
    concurrent_use.warn_of_concurrent_use("the engine generates")
    assert not caplog.messages
    communicator, _ = connected()
    for _ in range(2):
        concurrent_use.warn_of_concurrent_use("the engine generates")
    (said,) = caplog.messages
    assert "over NCCL while the engine generates" in said
    assert "use transport='ipc'" in said
    communicator.close()
    assert not nccl_module.CTAS.in_use()


def test_the_waits_of_a_broadcast_are_bounded():
    group, pg = connected(trainer_ranks=0)
    to_itself = ["start", "send", "recv", "ready"]
    assert [name for name, _ in pg.calls] == ["made", "eager", *to_itself]
    work = group.broadcast(DATA, 0)
    with pytest.raises(DeadlineExceeded, match="engine rank 0 could not finish a broadcast with engine rank 1 within"):
        work.wait()
    group.close()
    assert pg.aborted.is_set()


def test_a_rank_goes_through_its_communicators_in_their_order():
    groups = ((0, 3), (0, 1, 4), (0, 5))
    options = {"trainer_ranks": 3, "backend": "nccl", "device": GPU, "timeout_s": 5.0}
    communicators = Communicators(groups, peer_id=0, **options)
    store = dist.HashStore()
    for number, members in enumerate(groups):
        of_group = dist.PrefixStore(str(number), store)
        for rank in range(1, len(members)):
            of_group.set(f"joined/{rank}", "")
            of_group.set(f"ctas/{rank}", "16")
            of_group.add("entered", 1)

    connect_all(len(groups))
    communicators.connect(store, (3, 4, 5))
    order = [
        (name, number) for number, pg in enumerate(FakeNccl.made) for name, _ in pg.calls if name in ("ready", "end")
    ]
    assert order == [("ready", 0), ("end", 0), ("ready", 1), ("end", 1), ("ready", 2), ("end", 2)]
    pending = communicators.send([(5, DATA), (4, DATA), (3, DATA)])
    pending.wait()
    assert [[name for name, _ in pg.calls].count("end") for pg in FakeNccl.made] == [2] * 3
    communicators.abort()
    assert all(pg.aborted.is_set() for pg in FakeNccl.made)
