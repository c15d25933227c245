"""Each rule of the virtual GPUs, broken on purpose, is reported; and what real GPUs allow is not."""

import functools
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


def look_at_devices(process, trainer):
    own, host = process.tensor(torch.arange(4.0)), torch.arange(4.0)
    empty = torch.empty(0, dtype=torch.float32, device=process.device)
    made = torch.zeros(3, device=process.device)
    return (
        [
            str(t.device)
            for t in (own, own[1:], own.clone(), torch.nn.Parameter(own), made, empty, host, own.cpu().to("cpu"))
        ],
        [runtime().on_gpu(t) for t in (own, own.untyped_storage(), host)],
        runtime().uuid(process.device),
        runtime().visible(),
        runtime().allocator(),
    )


def test_tensors_say_which_gpu_they_are_on():
    ((devices, on_gpu, uuid, visible, allocator),) = run(look_at_devices, Place(HOST, (3, 2), own=1))
    assert devices == ["cuda:1"] * 6 + ["cpu"] * 2
    assert on_gpu == [True, True, False]
    assert (uuid, visible) == ("GPU-0000-0002", ("GPU-0000-0003", "GPU-0000-0002"))
    assert allocator == "native"


def use_an_index_that_is_not_there(process, _):
    torch.cuda.synchronize(1)


def test_a_gpu_that_is_not_visible_has_no_index():
    with pytest.raises(RuntimeError, match=r"invalid device ordinal \(1: this process sees \(3,\)"):
        run(use_an_index_that_is_not_there, Place(HOST, (3,)))


def use_another_gpu(process, _):
    runtime().synchronize([torch.device("cuda", 1)])


def test_a_context_on_another_gpu_than_the_own_is_reported():
    with pytest.raises(RuleBroken, match="a context was made on GPU 1, and the process's own is 0"):
        run(use_another_gpu, Place(HOST, (0, 1)))


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


def test_a_handle_is_opened_on_the_own_gpu_though_the_other_is_not_visible():
    told = run(map_and_read, Place(HOST, (0,)), Place(HOST, (2, 3), own=1))
    assert told[1] == ("cuda:1", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], 1)


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


def share_two_of_a_segment(process, _):
    with process.memory.segment(4096):
        a, b = (process.memory.tensor((5,), torch.float32) for _ in range(2))
    c = process.memory.tensor((5,), torch.float32)
    first, second, third = (runtime().allocation(t.data_ptr(), process.device) for t in (a, b, c))
    del c
    gc.collect()
    again = process.memory.tensor((5,), torch.float32)
    after = runtime().allocation(again.data_ptr(), process.device)
    return first == second, first.id != third.id, (third.base == after.base, third.id == after.id)


def test_tensors_of_a_segment_share_an_allocation_and_an_address_comes_again_with_another_id():
    assert run(share_two_of_a_segment, Place(HOST, (0,))) == [(True, True, (True, False))]


def share_as_torch_does(process, trainer, openers):
    """Whether memory is freed that so many processes have opened by torch's own handle."""
    tensor = process.tensor(torch.arange(6.0)) if trainer.rank == 0 else None
    process.cuda.synchronize(process.device)
    said = [tensor.untyped_storage()._share_cuda_() if trainer.rank == 0 else None]
    dist.broadcast_object_list(said, 0, trainer.group)
    seen = None
    if 0 < trainer.rank <= openers:
        storage = torch.UntypedStorage._new_shared_cuda(*said[0])
        seen = torch.empty(0).set_(storage, 0, (6,), (1,)).sum().item()
        del storage
        gc.collect()
    meet(trainer)
    del tensor
    gc.collect()
    process.memory.tensor((1,), torch.int8)  # torch looks at what it could not free when it allocates
    freed = not process.memory.reserved(process.place.number)
    meet(trainer)
    return seen if trainer.rank else freed


@pytest.mark.parametrize(("openers", "freed"), [(0, False), (1, True), (2, False)])
def test_memory_shared_by_torchs_counters_is_freed_if_one_process_has_opened_it(openers, freed):
    task = functools.partial(share_as_torch_does, openers=openers)
    told = run(task, *[Place(HOST, (0,))] * 3)
    assert told == [freed, *[15.0] * openers, *[None] * (2 - openers)]


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


def test_memory_that_is_freed_under_a_reader_is_reported():
    with pytest.raises(RuleBroken, match="allocation 1 was freed while process"):
        run(free_under_a_reader, Place(HOST, (0,)), Place(HOST, (0,)))


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


def test_reading_from_a_gpu_that_was_not_synchronized_is_reported():
    with pytest.raises(RuleBroken, match="which had not synchronized their GPU"):
        run(read_what_is_written, Place(HOST, (0,)), Place(HOST, (1,)))


def answer_while_mapped(process, trainer):
    tensor = process.tensor(torch.ones(3)) if trainer.rank == 0 else None
    handle, _ = share(process, trainer, tensor)
    try:
        if trainer.rank:
            with process.update(unmapped=True):
                runtime().open_handles([handle], process.device)
    finally:
        meet(trainer)


def test_a_mapping_at_the_answer_is_reported():
    with pytest.raises(RuleBroken, match="memory was still mapped at the answer"):
        run(answer_while_mapped, Place(HOST, (0,)), Place(HOST, (1,)), freed_while_mapped="undefined")


# -- the environment


def leave_a_setting(process, _):
    with process.update():
        os.environ["NCCL_CUMEM_ENABLE"] = "0"


def test_an_environment_that_is_another_afterwards_is_reported():
    with pytest.raises(RuleBroken, match=r"another environment: \['NCCL_CUMEM_ENABLE'\]"):
        run(leave_a_setting, Place(HOST, (0,)))


def change_together(process, _):
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    thread = threading.Thread(target=lambda: os.environ.update(TORCH_NCCL_BLOCKING_WAIT="1"))
    thread.start()
    thread.join()
    del os.environ["TORCH_NCCL_BLOCKING_WAIT"]


def test_two_threads_that_change_settings_at_once_are_reported():
    with pytest.raises(RuleBroken, match="was changed while another thread had changed"):
        run(change_together, Place(HOST, (0,)))


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


def send_and_receive(process, trainer):
    group = group_of(process, trainer)
    buffer = process.tensor(torch.full((4,), float(trainer.rank)))
    started = (group.send if trainer.rank == 0 else group.recv)([buffer], 1 - trainer.rank, 0)
    at_once = started.is_completed()
    done = completed(started)
    started.wait()
    group._start_coalescing()
    (group.send if trainer.rank == 1 else group.recv)([buffer], 1 - trainer.rank, 0)
    done = done and completed(group._end_coalescing())
    options = dist.BroadcastOptions()
    options.rootRank = 1
    done = done and completed(group.broadcast([buffer.add_(trainer.rank)], options))
    group.abort()
    return at_once, done, buffer.tolist()


def test_messages_arrive_later():
    assert run(send_and_receive, Place(HOST, (0,)), Place(HOST, (1,))) == [(False, True, [1.0] * 4)] * 2


def meet_on_one_gpu(process, trainer):
    group = group_of(process, trainer, blocking=False)
    end = time.monotonic() + 5
    while not group._ready.is_set() and time.monotonic() < end:
        time.sleep(0.01)


def test_a_gpu_twice_in_a_communicator_is_reported():
    with pytest.raises(RuleBroken, match="GPU GPU-0000-0001 is twice in one communicator"):
        run(meet_on_one_gpu, Place(HOST, (1,)), Place(HOST, (1,)))


def send_host_memory(process, trainer):
    group_of(process, trainer).send([torch.ones(3)], 0, 0)


def test_a_buffer_in_host_memory_is_reported():
    with pytest.raises(RuleBroken, match="NCCL was given host memory"):
        run(send_host_memory, Place(HOST, (1,)))


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


def test_settings_that_differ_are_reported():
    with pytest.raises(RuleBroken, match="settings differ between members of a host"):
        run(disagree, Place(HOST, (0,)), Place(HOST, (1,), environment={"NCCL_CUMEM_ENABLE": "0"}))


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


def test_communicators_that_do_not_find_room_on_a_gpu_together_are_reported():
    with pytest.raises(RuleBroken, match=r"communicators in use at once have \[32, 32, 32, 32, 32\] CTAs of 132"):
        run(use_many, Place(HOST, (0,)), Place(HOST, (1,)))


def wait_without_a_bound(process, trainer):
    group = group_of(process, trainer)
    buffer = process.tensor(torch.ones(3))
    group.recv([buffer], 1 - trainer.rank, 0).wait()


def test_waiting_for_what_has_not_ended_is_reported():
    with pytest.raises(RuleBroken, match="waited for before it had ended"):
        run(wait_without_a_bound, Place(HOST, (0,)), Place(HOST, (1,)))


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


def test_asking_for_a_communicator_that_nccl_still_connects_stops_the_whole_process_and_is_reported():
    with pytest.raises(RuleBroken, match=r"_comm_ptr waited for NCCL to connect.*the process stood still"):
        run(ask_before_it_is_connected, Place(HOST, (0,)), Place(HOST, (1,)))


def limit_differently(process, trainer):
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking, options.config.max_ctas = 0, 16 - trainer.rank
    group = dist.ProcessGroupNCCL(store_of(trainer), trainer.rank, trainer.size, options)
    group.eager_connect_single_device(process.device)
    time.sleep(0.5)
    group.abort()


def test_limits_of_thread_blocks_that_differ_are_reported():
    with pytest.raises(RuleBroken, match=r"limits of thread blocks differ between members, which hangs: \[15, 16\]"):
        run(limit_differently, Place(HOST, (0,)), Place(HOST, (1,)))


def test_what_was_broken_is_said_though_the_error_was_caught():
    with pytest.raises(RuleBroken, match="trainer rank 0: for example"), virtual_gpus() as gpus:
        journal.Journal(gpus.folder, "trainer rank 0").broken("for example")


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
