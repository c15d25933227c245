"""Each rule of the virtual GPUs, broken on purpose, is reported; and what real GPUs allow is not."""

import gc
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from benchmark.gpu.nccl_waits import ticking
from sglang_reshard.engine.update import UpdateExecutor
from sglang_reshard.errors import Unsupported
from sglang_reshard.gpu.runtime import runtime
from support import gpu_jobs
from support.virtual_gpus import journal
from support.virtual_gpus.description import Place
from support.virtual_gpus.journal import RuleBroken
from support.virtual_gpus.memory import POISON
from support.virtual_gpus.nccl import ENDED_BY_WATCHDOG, FROZEN_S
from support.virtual_gpus.world import run_tasks as run
from support.virtual_gpus.world import run_with_gpus, virtual_gpus

HOST = "host 0"


def meet(trainer):
    dist.barrier(trainer.group)


def share(process, trainer, tensor):
    """The first rank's handle on all ranks, as (handle, bytes)."""
    said = [None]
    if trainer.rank == 0:
        allocation = runtime().allocation(tensor.data_ptr(), process.device)
        said = [(runtime().export_handle(allocation, process.device), allocation.nbytes)]
    dist.broadcast_object_list(said, 0, trainer.group)
    return said[0]


# -- where memory is


def use_an_index_that_is_not_there(process, _):
    torch.cuda.synchronize(1)


def test_a_gpu_that_is_not_visible_has_no_index():
    with pytest.raises(RuntimeError, match=r"invalid device ordinal \(1: this process sees \(3,\)"):
        run(use_an_index_that_is_not_there, Place(HOST, (3,)))


def use_another_gpu(process, _):
    runtime().synchronize([torch.device("cuda", 1)])


# -- handles


def map_and_read(process, trainer):
    tensor = process.tensor(torch.arange(6.0)) if trainer.rank == 0 else None
    process.cuda.synchronize(process.device)
    handle, nbytes = share(process, trainer, tensor)
    seen = None
    if trainer.rank:
        address, again = runtime().open_handles([handle, handle], process.device)
        assert address == again  # counted, and mapped once
        storage = runtime().storage(address, nbytes, process.device)
        seen = torch.empty(0, device=process.device).set_(storage, 0, (6,), (1,))
        seen = (str(seen.device), seen.tolist(), len(process.memory.mappings()))
        runtime().close_handles([address, again], process.device)
    meet(trainer)
    return seen


def test_without_peer_access_a_handle_cannot_be_opened():
    with pytest.raises(RuntimeError, match="CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
        run(map_and_read, Place(HOST, (0,)), Place(HOST, (1,)), without_peers=frozenset({(1, 0)}))


def refuse(process, _):
    tensor = process.tensor(torch.ones(3))
    with pytest.raises(Unsupported, match="CUDA IPC handle"):
        runtime().allocation(tensor.data_ptr(), process.device)
    return runtime().allocator()


@pytest.mark.parametrize("allocator", ["expandable_segments", "cudaMallocAsync"])
def test_memory_of_these_kinds_has_no_handle(allocator):
    assert run(refuse, Place(HOST, (0,), allocator=allocator)) == [allocator]


def open_own(process, trainer):
    tensor = process.tensor(torch.ones(3))
    handle, _ = share(process, trainer, tensor)
    with pytest.raises(Unsupported, match="CUDA_ERROR_INVALID_CONTEXT"):
        runtime().open_handles([handle], process.device)
    return "refused"


def test_a_process_cannot_open_its_own_handle():
    assert run(open_own, Place(HOST, (0,))) == ["refused"]


# -- freed memory


def free_under_a_reader(process, trainer):
    tensor = process.tensor(torch.arange(6.0)) if trainer.rank == 0 else None
    process.cuda.synchronize(process.device)
    meet(trainer)
    before = process.memory.free_bytes(0)
    handle, nbytes = share(process, trainer, tensor)
    address = runtime().open_handles([handle], process.device)[0] if trainer.rank else 0
    meet(trainer)
    del tensor
    gc.collect()
    meet(trainer)
    seen = None
    if trainer.rank:
        seen = bytes(runtime().storage(address, nbytes, process.device))[:2]
        still_used = process.memory.free_bytes(0) == before
        with pytest.raises(Unsupported, match="CUDA_ERROR_INVALID_VALUE"):
            runtime().open_handles([handle[:20] + bytes([9]) + handle[21:]], process.device)
        runtime().close_handles([address], process.device)
        with pytest.raises(Unsupported, match="CUDA_ERROR_INVALID_VALUE"):
            runtime().open_handles([handle], process.device)
        seen = seen, still_used, process.memory.free_bytes(0) - before
    meet(trainer)
    return seen


def test_who_reads_freed_memory_reads_a_pattern_and_it_stays_used_until_it_is_unmapped():
    told = run(free_under_a_reader, Place(HOST, (0,)), Place(HOST, (0,)), freed_while_mapped="undefined")
    assert told[1] == (bytes([POISON] * 2), True, 512)


def keep_unused(process, _):
    process.memory.keeps_unused = True
    before = runtime().free_bytes(process.device), process.memory.free_bytes(0)
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device=process.device)
    del tensor
    gc.collect()
    counted = runtime().free_bytes(process.device) - before[0], process.memory.free_bytes(0) - before[1]
    runtime().trim(process.device)
    return counted, process.memory.free_bytes(0) - before[1]


def test_memory_that_the_allocator_keeps_is_returned_by_trimming():
    assert run(keep_unused, Place(HOST, (0,))) == [((0, -(1 << 20)), 0)]


# -- threads, and synchronizations


def enter_in_a_thread(process, trainer):
    def enter():
        with torch.cuda.device(process.device):  # the thread's own already: nothing happens
            seen.append(process.cuda.current_context())
        torch.cuda.synchronize(process.device)
        seen.append(process.cuda.current_context())

    seen = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return seen


def test_a_new_thread_has_no_context():
    assert run(enter_in_a_thread, Place(HOST, (3,))) == [[None, 3]]


def ask_in_a_thread(process, trainer):
    def ask():
        allocation = runtime().allocation(tensor.data_ptr(), process.device)
        seen.extend((len(runtime().export_handle(allocation, process.device)), process.cuda.current_context()))

    seen = []
    tensor = process.tensor(torch.ones(3))
    process.write(tensor, torch.zeros(3))
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return *seen, process.memory.streams.is_busy(0)


def test_handles_are_made_in_a_new_thread_and_wait_for_nothing():
    assert run(ask_in_a_thread, Place(HOST, (0,))) == [(64, 0, True)]


def read_what_is_written(process, trainer):
    tensor = process.tensor(torch.ones(3)) if trainer.rank == 0 else None
    handle, _ = share(process, trainer, tensor)
    if trainer.rank:
        (address,) = runtime().open_handles([handle], process.device)
        meet(trainer)
        try:
            process._sources_are_synchronized()
        finally:
            runtime().close_handles([address], process.device)
            meet(trainer)
    else:
        process.write(tensor, torch.zeros(3))
        meet(trainer)
        meet(trainer)


def answer_while_mapped(process, trainer):
    tensor = process.tensor(torch.ones(3)) if trainer.rank == 0 else None
    handle, _ = share(process, trainer, tensor)
    try:
        if trainer.rank:
            with process.update(unmapped=True):
                runtime().open_handles([handle], process.device)
    finally:
        meet(trainer)


# -- the environment


def leave_a_setting(process, _):
    with process.update():
        os.environ["NCCL_CUMEM_ENABLE"] = "0"


def change_together(process, _):
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    thread = threading.Thread(target=lambda: os.environ.update(TORCH_NCCL_BLOCKING_WAIT="1"))
    thread.start()
    thread.join()
    del os.environ["TORCH_NCCL_BLOCKING_WAIT"]


# -- NCCL


def store_of(trainer):
    return dist.PrefixStore("nccl", dist.distributed_c10d._get_default_store())


def group_of(process, trainer, blocking=True, timeout_s=5.0):
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    if not blocking:
        options.config.blocking = 0
    group = dist.ProcessGroupNCCL(store_of(trainer), trainer.rank, trainer.size, options)
    group.eager_connect_single_device(process.device)
    return group


def completed(work, seconds=5.0):
    end = time.monotonic() + seconds
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    return work.is_success()


def meet_on_one_gpu(process, trainer):
    group = group_of(process, trainer, blocking=False)
    end = time.monotonic() + 5
    while not group._ready.is_set() and time.monotonic() < end:
        time.sleep(0.01)


def send_host_memory(process, trainer):
    group_of(process, trainer).send([torch.ones(3)], 0, 0)


def wait_alone(process, trainer):
    """Only the first of two members comes."""
    if trainer.rank:
        meet(trainer)
        return None
    seconds = []

    def connect():
        try:
            groups.append(group_of(process, trainer))
        except dist.DistBackendError:
            seconds.append("aborted")

    groups, made = [], []
    begin = dist.ProcessGroupNCCL.__init__

    def remember(self, *args):
        made.append(self)
        begin(self, *args)

    dist.ProcessGroupNCCL.__init__ = remember
    thread = threading.Thread(target=connect)
    thread.start()
    thread.join(1.0)
    waited = thread.is_alive()
    made[0].abort()
    thread.join(5.0)
    meet(trainer)
    return waited, seconds, groups


def test_construction_waits_for_all_members_and_is_ended_by_abort():
    assert run(wait_alone, Place(HOST, (0,)), Place(HOST, (1,)))[0] == (True, ["aborted"], [])


def disagree(process, trainer):
    group = group_of(process, trainer, blocking=False)
    time.sleep(0.5)
    ready = group._is_initialized()
    group.abort()
    assert not ready


def use_many(process, trainer):
    groups = []
    for number in range(5):
        options = dist.ProcessGroupNCCL.Options()
        groups.append(dist.ProcessGroupNCCL(dist.PrefixStore(str(number), store_of(trainer)), trainer.rank, 2, options))
        groups[-1].eager_connect_single_device(process.device)
    buffer = process.tensor(torch.ones(3))
    works = [group.recv([buffer], 1 - trainer.rank, 0) for group in groups]
    for group in groups:
        group.abort()
    return len(works)


def wait_without_a_bound(process, trainer):
    group = group_of(process, trainer)
    buffer = process.tensor(torch.ones(3))
    group.recv([buffer], 1 - trainer.rank, 0).wait()


def receive_nothing(process, trainer):
    group = group_of(process, trainer, timeout_s=0.3)
    if trainer.rank:
        time.sleep(2)
        return None
    work = group.recv([process.tensor(torch.ones(3))], 1, 0)
    completed(work)
    return str(work.exception())


def test_the_watchdog_ends_a_process_whose_operation_lasts_too_long():
    with pytest.raises(RuleBroken, match=r"NCCL's watchdog ended the process: an operation took longer than 0\.3 s"):
        run(receive_nothing, Place(HOST, (0,)), Place(HOST, (1,)))
    assert ENDED_BY_WATCHDOG


def receive_nothing_without_a_watchdog(process, trainer):
    group = group_of(process, trainer, timeout_s=0.3)
    if trainer.rank:
        meet(trainer)
        group.abort()
        return None
    work = group.recv([process.tensor(torch.ones(3))], 1, 0)
    ended = completed(work, 1.0)
    meet(trainer)  # its wait aborts, which lasts until the other has done so, too
    try:
        with runtime().waiting_stream(process.device):
            work.wait()
    except dist.DistBackendError as error:
        return ended, str(error)


def test_without_a_watchdog_only_a_wait_has_an_end():
    quiet = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    told = run(receive_nothing_without_a_watchdog, *(Place(HOST, (n,), environment=quiet) for n in (0, 1)))
    assert told[0] == (False, "Watchdog caught collective operation timeout: ran for 0.3 s")


def wait_on_the_default_stream(process, trainer):
    group = group_of(process, trainer)
    buffer = process.tensor(torch.ones(3))
    if trainer.rank:
        time.sleep(0.3)
        work = group.send([buffer], 0, 0)
        completed(work)
    else:
        group.recv([buffer], 1, 0).wait()
    group.abort()


def test_a_stream_that_computes_and_was_made_to_wait_is_reported():
    quiet = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    with pytest.raises(RuleBroken, match="the default stream was made to wait for an operation of NCCL"):
        run(wait_on_the_default_stream, *(Place(HOST, (n,), environment=quiet) for n in (0, 1)))


def abort_before_the_other(process, trainer):
    """Asks meanwhile whether an operation has ended: the thread that would abort the other group cannot run."""
    group = group_of(process, trainer)
    work = group.recv([process.tensor(torch.ones(3))], 1 - trainer.rank, 0)
    if trainer.rank:
        meet(trainer)
        group.abort()
        return None
    thread = threading.Thread(target=group.abort)
    thread.start()
    time.sleep(0.2)
    with ticking() as still_s:
        asking = threading.Thread(target=work.is_completed)
        asking.start()
        time.sleep(0.2)
        meet(trainer)
        thread.join()
        asking.join()
    return still_s()


def test_asking_during_an_abort_stops_the_whole_process_and_is_reported():
    told = []
    with pytest.raises(RuleBroken, match=r"is_completed waited .* process stood still"):
        run(abort_before_the_other, Place(HOST, (0,)), Place(HOST, (1,)), told=told)
    assert told[0] > FROZEN_S / 2


def ask_before_it_is_connected(process, trainer):
    if trainer.rank:
        time.sleep(0.5)
    group = group_of(process, trainer, blocking=False)
    if trainer.rank == 0:
        group._comm_ptr()
    group.abort()


def limit_differently(process, trainer):
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking, options.config.max_ctas = 0, 16 - trainer.rank
    group = dist.ProcessGroupNCCL(store_of(trainer), trainer.rank, trainer.size, options)
    group.eager_connect_single_device(process.device)
    time.sleep(0.5)
    group.abort()


def test_what_was_broken_is_said_though_the_error_was_caught():
    with pytest.raises(RuleBroken, match="trainer rank 0: for example"), virtual_gpus() as gpus:
        journal.Journal(gpus.folder, "trainer rank 0").broken("for example")


ONE, TWO = [Place(HOST, (0,))], [Place(HOST, (0,)), Place(HOST, (1,))]
OTHER_SETTING = [TWO[0], Place(HOST, (1,), environment={"NCCL_CUMEM_ENABLE": "0"})]
# What a task does wrong, on which GPUs, and what is said of it.
BROKEN = {
    use_another_gpu: ([Place(HOST, (0, 1))], "a context was made on GPU 1, and the process's own is 0"),
    free_under_a_reader: (ONE * 2, "allocation 1 was freed while process"),
    read_what_is_written: (TWO, "which had not synchronized their GPU"),
    leave_a_setting: (ONE, r"another environment: \['NCCL_CUMEM_ENABLE'\]"),
    change_together: (ONE, "was changed while another thread had changed"),
    meet_on_one_gpu: (ONE * 2, "GPU GPU-0000-0000 is twice in one communicator"),
    send_host_memory: (ONE, "NCCL was given host memory"),
    disagree: (OTHER_SETTING, "settings differ between members of a host"),
    use_many: (TWO, r"communicators in use at once have \[32, 32, 32, 32, 32\] CTAs of 132"),
    wait_without_a_bound: (TWO, "waited for before it had ended"),
    ask_before_it_is_connected: (TWO, r"_comm_ptr waited for NCCL to connect.*the process stood still"),
    limit_differently: (TWO, r"limits of thread blocks differ between members, which hangs: \[15, 16\]"),
}


@pytest.mark.parametrize("task", BROKEN, ids=lambda task: task.__name__)
def test_a_rule_that_is_broken_is_reported(task):
    places, says = BROKEN[task]
    with pytest.raises(RuleBroken, match=says):
        run(task, *places)


def test_a_mapping_at_the_answer_is_reported():
    with pytest.raises(RuleBroken, match="memory was still mapped at the answer"):
        run(answer_while_mapped, *TWO, freed_while_mapped="undefined")


# -- the package, with a rule taken out


def serve_without_unmapping(rank, size, requests, process, job):
    UpdateExecutor.unmap = lambda self: None
    return gpu_jobs.serve(rank, size, requests, process, job)


def serve_without_waiting(rank, size, requests, process, job):
    UpdateExecutor._synchronize = lambda self: None
    return gpu_jobs.serve(rank, size, requests, process, job)


@pytest.mark.parametrize(
    ("serve", "unmap_after", "rule"),
    [
        (serve_without_unmapping, True, "memory was still mapped at the answer"),
        (serve_without_waiting, False, "voted commit before its copies had ended"),
    ],
)
def test_an_update_that_forgets_a_rule_is_reported(serve, unmap_after, rule):
    job = gpu_jobs.Job((1,), 1, update_options={"unmap_after": unmap_after})
    with pytest.raises(RuleBroken, match=rule), virtual_gpus(gpus=1) as gpus:
        run_with_gpus(gpus, [Place(HOST, (0,))], [Place(HOST, (0,))], gpu_jobs.train, serve, job)
