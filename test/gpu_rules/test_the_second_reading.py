"""What a second reading of the code for GPUs found, what is done about it, and the tests that hold it.

PYTHONPATH=. python test/gpu_rules/test_the_second_reading.py    # the table of docs/reliability.md
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from tools import marked

TEST = Path(__file__).parent.parent
PAGE = TEST.parent / "docs" / "reliability.md"
NAME = "gpu-rules-second-reading"


class Hazard(NamedTuple):
    """What fails, what is done, and names of tests in files beside this folder, without their parameters."""

    fails: str
    done: str
    tests: tuple[str, ...]


WAITS, MEMORY, CAPTURES = (
    "gpu_rules/test_nccl_waits.py",
    "gpu_rules/test_engine_memory.py",
    "gpu_rules/test_captures.py",
)

HAZARDS = {
    1: Hazard(
        "`Work.is_completed` of NCCL keeps Python's interpreter lock and waits for a communicator that another thread "
        "aborts, or for a CUDA call of another thread: the whole process stands still",
        "`Work.wait` instead, which has given the lock back, on a stream on which nothing computes",
        (
            "gpu_rules/test_the_harness.py::test_asking_during_an_abort_stops_the_whole_process_and_is_reported",
            f"{WAITS}::test_a_wait_that_is_aborted_beside_a_stopped_peer_stops_no_other_thread",
        ),
    ),
    2: Hazard(
        "`_comm_ptr` keeps the interpreter lock until NCCL has connected all members, for half an hour beside one that "
        "is stopped",
        "a message of each rank to itself, waited for without the lock",
        (f"{WAITS}::test_connecting_to_a_peer_that_is_stopped_ends_and_stops_no_other_thread",),
    ),
    3: Hazard(
        "a memory saver maps other pages at the addresses of the engine's weights, and memory that is registered with "
        "NIXL stays the old pages",
        "registrations of live weights are dropped before SGLang releases these, and a staged update is ended; trainer "
        "ranks register memory without handles again once torch has unmapped any",
        (
            f"{MEMORY}::test_an_engine_rank_that_keeps_its_registrations_is_reported",
            f"{MEMORY}::test_engines_that_pass_on_weights_do_so_from_the_pages_that_are_there",
            f"{MEMORY}::test_a_staged_update_ends_when_the_weights_under_it_are_released",
            "unit/test_released_pages.py::test_receivers_are_told_before_the_memory_saver_releases_weights",
            "unit/test_released_pages.py::"
            "test_what_is_registered_of_memory_without_handles_is_registered_again_once_torch_has_unmapped_any",
            f"{MEMORY}::test_weights_arrive_in_the_pages_that_a_memory_saver_has_resumed",
        ),
    ),
    4: Hazard(
        "weights are sent over NCCL while the process runs collectives of its own (staged updates of an engine with "
        "several ranks, `update_async`): the two wait for each other",
        "a warning; the deadline ends it, since nothing keeps the lock (1, 2); the battery tries it on two GPUs",
        ("unit/test_nccl.py::test_communicators_beside_nccl_of_the_process_itself_are_warned_of_once",),
    ),
    5: Hazard(
        "communicators of 16 thread blocks each, of nine engines that are updated at once, exceed the 132 "
        "multiprocessors of an H100",
        "a process divides its multiprocessors by the communicators that it uses at once, and all members of a "
        "communicator take the least",
        (
            "unit/test_nccl.py::test_communicators_that_are_used_at_once_share_a_gpu_and_all_members_have_the_least",
            f"{WAITS}::test_nine_engines_at_once_find_room_on_a_gpu_of_their_trainers",
        ),
    ),
    6: Hazard(
        "an engine rank opens every allocation of the trainer ranks that it reads, waits for the GPU at each close, "
        "and a trainer rank asks for all of them in every update",
        "it opens those that its reads touch and closes them after one wait; a trainer rank asks once torch has "
        "freed any",
        (
            "unit/test_gpu_memory.py::test_memory_of_several_trainer_ranks_is_closed_after_one_wait",
            "unit/test_gpu_memory.py::test_allocations_are_asked_for_only_once_torchs_allocator_has_freed_any",
            "fuzz/test_random_plans.py::test_every_element_lands_and_nothing_else_is_written",
            f"{MEMORY}::test_an_engine_rank_opens_the_allocations_that_it_reads_and_one_to_try_each_trainer_rank",
        ),
    ),
    7: Hazard(
        "settings of NCCL differ between hosts of one NVLink domain, are set in a file, or limit channels: NCCL hangs",
        "they are read from files as well, and compared within hosts, within NVLink domains, and over all members",
        (
            "unit/test_nccl_settings.py::test_files_set_what_the_environment_does_not",
            "unit/test_cluster_topology.py::test_limits_of_channels_have_to_agree_wherever_the_ranks_are",
            "unit/test_cluster_topology.py::test_an_nvlink_domain_of_several_hosts_is_one_host_to_nccl",
        ),
    ),
    8: Hazard(
        "`update_async` waits for a device in its thread, which breaks a capture of a CUDA graph by the trainer",
        "the thread waits for an event after the copy, and has relaxed its capture mode",
        (
            f"{CAPTURES}::test_a_wait_for_a_device_breaks_captures",
            f"{CAPTURES}::test_calls_of_a_thread_that_has_not_relaxed_its_mode_break_captures",
            f"{CAPTURES}::test_an_update_in_the_background_breaks_no_capture",
        ),
    ),
    9: Hazard(
        "torch's flight recorder borrows the events of works, which it would read after they are freed",
        "the last works are kept, as many as the recorder has entries; they refer to no tensor",
        (
            "unit/test_nccl.py::test_every_operation_is_kept_for_the_flight_recorder",
            "unit/test_nccl.py::test_works_are_kept_as_long_as_the_flight_recorder_has_their_events",
        ),
    ),
    10: Hazard(
        "NCCL's non-blocking mode has hung at random (pytorch#153960)",
        "only in it can a communicator be aborted while it connects; the battery runs 10,000 broadcasts on two GPUs",
        ("unit/test_gpu_battery.py::test_every_item_passes_on_virtual_cards_or_says_why_it_cannot_run",),
    ),
    11: Hazard(
        "`release_memory_occupation` unmaps weights that a staged update reads, and the scheduler dies",
        "it is refused while an update runs",
        (
            "unit/test_weights_info.py::test_weights_are_not_released_if_an_update_begins_while_others_take_them",
            "unit/test_weights_info.py::test_weights_are_not_released_while_an_update_runs",
        ),
    ),
    12: Hazard(
        "a handle is opened and nothing is read, where reads from GPU to GPU bring other bytes than were written",
        "a kernel compares a page that the trainer rank has written; where it differs, memory is not mapped",
        (
            "unit/test_gpu_memory.py::test_memory_that_reads_as_other_bytes_cannot_be_mapped",
            f"{MEMORY}::test_weights_are_not_read_by_a_way_that_brings_other_bytes",
        ),
    ),
    13: Hazard(
        "a group that the trainer makes in the same moment as this package makes one has no watchdog of torch's",
        "only the constructor call sees the variable; torch has no option instead. Make groups before the first "
        "`update_async`, or after `handle.wait()`",
        (
            "unit/test_nccl.py::test_it_is_made_without_a_watchdog_and_does_not_block",
            "unit/test_nccl.py::test_the_variable_is_set_for_the_constructor_alone",
        ),
    ),
    14: Hazard(
        "each engine rank registers all of the trainer ranks' arenas with CUDA, which takes seconds and page tables",
        "it maps the files and registers the pages that it reads, all of these or none",
        (
            "unit/test_host_arena.py::test_all_pages_are_registered_or_none",
            "unit/test_host_arena.py::test_only_pages_that_are_read_are_registered",
        ),
    ),
}


def table() -> str:
    lines = ["| # | what fails | what is done | a test that holds it |", "|---:|---|---|---|"]
    for number, hazard in sorted(HAZARDS.items()):
        file, _, name = hazard.tests[-1].partition("::")
        test = f"`test/{file}`: {name.removeprefix('test_').replace('_', ' ')}"
        lines.append(f"| {number} | {hazard.fails} | {hazard.done} | {test} |")
    return "\n".join(lines)


def test_the_table_of_the_document_is_up_to_date():
    assert marked.read(PAGE, NAME) == table()


@pytest.mark.parametrize("test", sorted({test for hazard in HAZARDS.values() for test in hazard.tests}))
def test_a_test_that_holds_a_hazard_exists(test):
    file, _, name = test.partition("::")
    tree = ast.parse((TEST / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


if __name__ == "__main__":
    marked.write(PAGE, NAME, table())
