"""NCCL groups end no process, change no environment, and share a GPU's multiprocessors.

That a group blocks nothing which a deadline or an abort does not end is shown on virtual GPUs, in test/gpu_rules.
"""

import os
import threading
import time
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from sglang_reshard.errors import PeerDisconnected
from sglang_reshard.gpu import runtime as gpu
from sglang_reshard.routes.wire import concurrent_use
from sglang_reshard.routes.wire import nccl as nccl_module
from sglang_reshard.routes.wire.communicator import Communicator
from sglang_reshard.routes.wire.ctas import CtaShares
from sglang_reshard.routes.wire.nccl import NcclGroup, changed_environment
from sglang_reshard.routes.wire.recorded_works import recorder_entries
from support.gpu_runtime import replaced_runtime

GPU = torch.device("meta")  # memory that is not the host's
DATA = torch.zeros(8, dtype=torch.uint8)


class FakeNccl:
    """torch's ProcessGroupNCCL as far as it is used: it keeps the environment of each call, and nothing waits."""

    made: ClassVar[list["FakeNccl"]] = []
    fails = False

    def __init__(self, store, rank, size, options):
        self.options, self.environments = options, {"made": dict(os.environ)}
        self.calls, self.waits = [], []
        FakeNccl.made.append(self)
        if FakeNccl.fails:
            raise RuntimeError("made failed")

    def __getattr__(self, name):
        def call(*arguments):
            self.environments[name] = dict(os.environ)
            self.calls.append((name, *arguments[1:]))
            return SimpleNamespace(wait=lambda timeout: self.waits.append(timeout.total_seconds()))

        return call


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
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl)
    options = SimpleNamespace(config=SimpleNamespace(blocking=None, max_ctas=None))
    monkeypatch.setattr(FakeNccl, "Options", lambda: options, raising=False)
    with replaced_runtime(OneGpu()):
        yield


def connected(at_once=1, theirs=16):
    """A group whose other member has come already."""
    store = dist.HashStore()
    store.set("ctas/1", str(theirs))
    store.add("entered", 1)
    group = NcclGroup(store, 0, 2, GPU, 0.5, at_once=at_once)
    group.connect()
    return group, FakeNccl.made[0]


def test_it_is_made_without_a_watchdog_and_does_not_block():
    before = dict(os.environ)
    _, pg = connected()
    assert pg.environments["made"]["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert pg.options.config.blocking == 0
    assert pg.options.config.max_ctas == 16
    assert dict(os.environ) == before


@pytest.mark.parametrize(("at_once", "theirs", "expected"), [(8, 16, 16), (9, 16, 14), (1, 5, 5), (200, 16, 1)])
def test_communicators_that_are_used_at_once_share_a_gpu_and_all_members_have_the_least(at_once, theirs, expected):
    assert connected(at_once, theirs)[1].options.config.max_ctas == expected


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
    group, pg = connected()
    assert len(works) == 1
    ((_, work),) = group.start("send", [(1, DATA)])
    group.broadcast(DATA, 0)
    assert len(works) == 3
    assert pg.calls.count(("send", 1, 0)) == 1
    group.wait(work, time.monotonic())
    connecting, sending = pg.waits
    assert connecting > 0.5, "torch would abort the communicator before the deadline"
    assert sending == 0.5


def test_a_failure_to_start_is_an_error_of_this_rank(monkeypatch):
    store = dist.HashStore()
    store.set("joined/1", "")
    store.set("ctas/1", "16")
    store.add("entered", 1)
    options = {"members": [0, 1], "trainer_ranks": 1, "device": GPU, "timeout_s": 20.0}
    communicator = Communicator(peer_id=0, **options)
    communicator.connect(store)
    monkeypatch.setattr(FakeNccl, "send", Mock(side_effect=RuntimeError("send failed")), raising=False)
    with pytest.raises(
        PeerDisconnected, match=r"trainer rank 0 could not send a message to engine rank 0: .*send failed"
    ):
        communicator.send([(1, DATA)])


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_the_environment_is_as_before_also_when_it_cannot_be_made(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", value)
    before = dict(os.environ)
    monkeypatch.setattr(FakeNccl, "fails", True)
    with pytest.raises(RuntimeError, match="made failed"):
        connected()
    assert dict(os.environ) == before


def test_the_variable_is_set_for_the_constructor_alone():
    """A group that another thread makes while this one is set would have no watchdog."""
    group, pg = connected()
    group.start("receive", [(1, DATA)])
    assert {name for name, seen in pg.environments.items() if "TORCH_NCCL_BLOCKING_WAIT" in seen} == {"made"}
    assert {"eager_connect_single_device", "_start_coalescing", "recv"} < pg.environments.keys()


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


def test_an_aborted_operation_has_not_succeeded_though_its_kernel_has_ended():
    group, _ = connected()
    group.abort(())
    with pytest.raises(RuntimeError, match="aborted"):
        group.wait(SimpleNamespace(wait=lambda timeout: None), time.monotonic())


def test_an_abort_does_not_ask_the_users_groups_to_end_the_process(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_EXTRA_DUMP_ON_EXEC", "1")
    group, pg = connected()
    group.abort(())
    assert pg.environments["abort"]["TORCH_NCCL_EXTRA_DUMP_ON_EXEC"] == "0"
    assert os.environ["TORCH_NCCL_EXTRA_DUMP_ON_EXEC"] == "1"


def test_communicators_beside_nccl_of_the_process_itself_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(concurrent_use, "CTAS", nccl_module.CTAS)
    concurrent_use._warn.cache_clear()
    concurrent_use.warn_of_concurrent_use("the engine generates")
    assert not caplog.messages
    group, _ = connected()
    for _ in range(2):
        concurrent_use.warn_of_concurrent_use("the engine generates")
    (said,) = caplog.messages
    assert "over NCCL while the engine generates" in said
    assert "use transport='ipc'" in said
    group.close()
    assert not nccl_module.CTAS.in_use()
