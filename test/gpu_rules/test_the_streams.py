"""The virtual GPUs do what they are given late, in the order of streams; whoever forgets to wait is found out."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

from sglang_reshard import tasks
from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.gpu.recorded_work import RecordedWork
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.memory import peer_memory
from sglang_reshard.routes.nixl import streams as nixl_streams
from support import gpu_jobs
from support.gpu_jobs import Job, train_in_background
from support.virtual_gpus.description import Place
from support.virtual_gpus.journal import RuleBroken
from support.virtual_gpus.memory import POISON
from support.virtual_gpus.world import run_tasks, run_with_gpus, virtual_gpus

HOST = "host 0"
BYTES = 512


def on_gpu(process, value):
    """A tensor of such bytes, which are there."""
    tensor = process.tensor(torch.full((BYTES,), value, dtype=torch.uint8))
    process.cuda.synchronize(process.device)
    return tensor


def copies_of(destination, source):
    copies = CopyList()
    copies.add(destination, source)
    copies.build()
    return copies


def now(tensor):
    """The byte that is in all of its memory now, whatever has been started."""
    (found,) = set((ctypes.c_ubyte * BYTES).from_address(tensor.data_ptr()))
    return found


def use_two_streams(process, _trainer):
    source, middle, destination = (on_gpu(process, value) for value in (7, 1, 2))
    first, second = copies_of(middle, source), copies_of(destination, middle)
    other = torch.cuda.Stream(process.device)
    seen = []
    for wait in ("nothing", "stream", "event"):
        middle.fill_(1)
        process.cuda.synchronize(process.device)
        first.run()
        if wait == "stream":
            other.wait_stream(torch.cuda.current_stream())
        elif wait == "event":
            event = torch.cuda.Event()
            event.record()
            event.wait(other)
        with torch.cuda.stream(other):
            second.run()
        other.synchronize()
        seen.append(now(destination))
    return seen


def test_a_stream_waits_for_another_only_where_it_is_told_to():
    assert run_tasks(use_two_streams, Place(HOST, (0,))) == [[1, 7, 7]]


def free_under_a_kernel(process, _trainer, record):
    """A kernel of another stream reads memory that is freed, and perhaps used again, before it begins."""
    process.memory.keeps_unused = True
    seen = []
    for again in (False, True):
        source, destination = on_gpu(process, 7), on_gpu(process, 1)
        other = torch.cuda.Stream(process.device)
        copies = copies_of(destination, source)
        with torch.cuda.stream(other):
            copies.run()
        if record:
            other.synchronize()
        copies._sources.clear()
        del source
        gc.collect()
        new = [process.memory.tensor((BYTES,), torch.uint8).fill_(9) for _ in range(8 * again)]
        process.cuda.synchronize(process.device)
        seen.append(now(destination))
        del new
    return seen


def free_too_early(process, trainer):
    return free_under_a_kernel(process, trainer, record=False)


def free_in_time(process, trainer):
    return free_under_a_kernel(process, trainer, record=True)


def test_a_kernel_reads_a_pattern_where_memory_was_freed_before_it_and_what_others_have_written_there():
    assert run_tasks(free_too_early, Place(HOST, (0,))) == [[POISON, 9]]
    assert run_tasks(free_in_time, Place(HOST, (0,))) == [[7, 7]]


def reuse_in_order(process, _trainer):
    """Within one stream memory may be freed at once."""
    process.memory.keeps_unused = True
    source, destination = on_gpu(process, 7), on_gpu(process, 1)
    address = source.data_ptr()
    copies = copies_of(destination, source)
    copies.run()
    copies._sources.clear()
    del source
    gc.collect()
    new = process.memory.tensor((BYTES,), torch.uint8)
    is_same = new.data_ptr() == address
    new.fill_(9)
    process.cuda.synchronize(process.device)
    with torch.cuda.stream(torch.cuda.Stream(process.device)):
        apart = process.memory.tensor((BYTES,), torch.uint8).data_ptr()
    return is_same, now(destination), apart == address


def test_memory_is_used_again_in_the_order_of_its_stream():
    assert run_tasks(reuse_in_order, Place(HOST, (0,))) == [(True, 7, False)]


def wait_in_another_thread(process, _trainer):
    source, destination = on_gpu(process, 7), on_gpu(process, 1)
    first, later = copies_of(destination, source), copies_of(destination, on_gpu(process, 8))
    first.run()
    work = RecordedWork()
    work.record()
    later.run()
    tasks.start("test", work.wait).result()
    return now(destination)


def test_recorded_work_is_waited_for_in_another_thread_and_nothing_after_it():
    assert run_tasks(wait_in_another_thread, Place(HOST, (0,))) == [7]


def use_own_stream(process, _trainer):
    middle, destination, seen = on_gpu(process, 1), on_gpu(process, 1), []
    for fails in (False, True):
        for tensor in (middle, destination):
            tensor.fill_(1)
        process.cuda.synchronize(process.device)
        source = on_gpu(process, 7 + fails)
        copies_of(middle, source).run()
        with contextlib.suppress(OSError), runtime().own_stream(process.device):
            copies_of(destination, middle).run()
            if fails:
                raise OSError("it stumbled")
        seen.append(now(destination))
    return seen


def test_an_own_stream_waits_for_all_others_first_and_for_itself_last():
    assert run_tasks(use_own_stream, Place(HOST, (0,))) == [[7, 8]]


def call_while_capturing(process, _trainer):
    def allocate():
        process.memory.tensor((3,), torch.float32)

    def outcome(call):
        try:
            call()
        except RuleBroken as error:
            return str(error)
        return "done"

    event = runtime().event(process.device)
    with process.memory.captures.capture():
        beside = [
            tasks.start("test", lambda call=call: outcome(call)).result() for call in (allocate, event.synchronize)
        ]
        return [*beside, outcome(allocate), outcome(event.query), outcome(torch.cuda.synchronize)]


def test_threads_that_spare_captures_allocate_and_wait_for_events_and_others_break_them():
    with pytest.raises(RuleBroken) as broken:
        run_tasks(call_while_capturing, Place(HOST, (0,)))
    told = str(broken.value).splitlines()
    assert [line.partition(": ")[2].partition(" was")[0] for line in told] == [
        "cudaMalloc", "cudaEventQuery", "cudaDeviceSynchronize"
    ]  # fmt: skip


# -- the package, with a wait taken out


def run(serve, job, train=gpu_jobs.train, engines="a"):
    with virtual_gpus(hosts=("a", "b"), gpus=2, freed_while_mapped="undefined") as gpus:
        places = [[Place(host, (0, 1), n) for n in range(2)] for host in ("a", engines)]
        return run_with_gpus(gpus, *places, train, serve, job)


def serve_without_waiting_before_unmapping(*args):
    """And nowhere else: an update whose copies were waited for has nothing left."""
    silent = SimpleNamespace(**{name: getattr(runtime(), name) for name in dir(runtime()) if not name.startswith("__")})
    silent.synchronize = lambda devices: None
    peer_memory.runtime = lambda: silent
    return serve_failing_after_its_copies(*args)


def serve_failing_after_its_copies(rank, size, requests, process, job):
    """The first update fails once its copies have been started; the memory that they read is unmapped then."""
    from sglang_reshard.engine.update import UpdateExecutor

    stock = UpdateExecutor._synchronize

    def fail_once(executor):
        UpdateExecutor._synchronize = stock
        raise OSError("it stumbled")

    UpdateExecutor._synchronize = fail_once
    return gpu_jobs.serve(rank, size, requests, process, job)


def train_until_it_succeeds(trainer, process, _job):
    return gpu_jobs.train_through_failures(trainer, process, "ipc", updates=2)


def test_memory_is_unmapped_after_the_copies_that_read_it_though_the_update_has_failed():
    told, served = run(serve_failing_after_its_copies, Job((2,), 2), train_until_it_succeeds)
    assert "it stumbled" in told[0][0]
    assert told[0][1] == "updated"
    assert all(s.versions == ["2"] and not s.differing for s in served)


def test_memory_that_is_unmapped_under_copies_is_reported():
    with pytest.raises(RuleBroken, match="a kernel read from an illegal address"):
        run(serve_without_waiting_before_unmapping, Job((2,), 2), train_until_it_succeeds)


def serve_with_buckets_that_are_overwritten(*args):
    nixl_streams.runtime = lambda: SimpleNamespace(synchronize=lambda devices: None)
    return gpu_jobs.serve(*args)


@pytest.mark.parametrize(
    ("serve", "differ"), [(gpu_jobs.serve, False), (serve_with_buckets_that_are_overwritten, True)]
)
def test_a_bucket_is_read_into_again_once_it_has_been_copied_out(serve, differ):
    job = Job((2,), 2, options={"transport": "nixl", "bucket_bytes": 2048})
    _, served = run(serve, job, engines="b")
    assert any(s.differing for s in served) == differ


def train_without_waiting_for_the_copy(*args):
    RecordedWork.wait = lambda self: None
    return train_in_background(*args)


def test_an_update_in_the_background_that_does_not_wait_for_the_copy_sends_other_weights():
    job = Job((2,), 2, updates=2, options={"transport": "ipc"})
    _, served = run(gpu_jobs.serve, job, train_in_background)
    assert not any(s.differing for s in served)
    with pytest.raises(RuleBroken, match="which had not synchronized their GPU"):
        run(gpu_jobs.serve, job, train_without_waiting_for_the_copy)
