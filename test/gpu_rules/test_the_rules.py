"""Which tests hold each rule of GPUs; all of them exist, and the table in docs/reliability.md names them.

PYTHONPATH=. python test/gpu_rules/test_the_rules.py    # the table anew
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from tools import marked

TEST = Path(__file__).parent.parent
PAGE = TEST.parent / "docs" / "reliability.md"
NAME = "gpu-rules"


class Rule(NamedTuple):
    """`tests` are names in files beside this folder, without their parameters."""

    says: str
    tests: tuple[str, ...]


SHAPES, LIFE, HARNESS = (f"gpu_rules/{name}.py" for name in ("test_shapes", "test_life_and_death", "test_the_harness"))
EVERY_SIZE = f"{SHAPES}::test_replicas_of_every_size_read_the_memory_of_their_host"
OVER_HOSTS = f"{SHAPES}::test_replicas_within_a_host_over_two_and_over_all"
WITHOUT_HANDLES = f"{SHAPES}::test_memory_without_handles_is_sent_where_no_gpu_would_be_twice_in_a_communicator"
WAITS = "gpu_rules/test_nccl_waits.py"
FREED_AT_ONCE = f"{LIFE}::test_memory_is_freed_right_after_an_update_of_every_kind"
SAME_ADDRESS = f"{LIFE}::test_memory_that_comes_again_at_its_address_is_mapped_anew"
ONE_FAILS = f"{LIFE}::test_a_failure_ends_no_process_and_the_next_update_succeeds"
AT_ONCE = f"{LIFE}::test_engines_that_are_connected_at_once_leave_the_environment_and_find_room_on_a_gpu"

RULES = {
    1: Rule(
        "memory is freed however many processes have mapped it, and nothing is left of a mapping",
        (
            f"{LIFE}::test_shards_that_move_in_every_update_leave_nothing_behind",
            f"{HARNESS}::test_memory_shared_by_torchs_counters_is_freed_if_one_process_has_opened_it",
            "unit/test_gpu_memory.py::test_every_allocation_is_one_handle_and_asked_for_once",
        ),
    ),
    2: Rule(
        "an engine rank maps memory of GPUs that it does not see",
        (
            EVERY_SIZE,
            "unit/test_cluster_topology.py::test_colocated_engines_of_any_size_read_memory",
            "unit/test_gpu_memory.py::test_shards_are_read_through_mappings_of_the_engines_own_device",
        ),
    ),
    3: Rule(
        "no rank makes a context on another GPU than its own, or maps memory that its GPU cannot reach",
        (
            EVERY_SIZE,
            f"{SHAPES}::test_gpus_without_peer_access",
            "unit/test_cluster_topology.py::test_a_pair_without_peer_access_is_sent_what_others_read",
        ),
    ),
    4: Rule(
        "broadcast groups are connected before a byte is written, and their waits are bounded",
        (
            ONE_FAILS,
            f"{WAITS}::test_a_broadcast_that_is_aborted_beside_a_stopped_peer_stops_no_other_thread",
            "unit/test_abortable_group.py::test_a_broadcast_ends_at_its_deadline_and_names_the_others",
        ),
    ),
    5: Rule(
        "no watchdog of NCCL's ends a process",
        (
            ONE_FAILS,
            "unit/test_nccl.py::test_it_is_made_without_a_watchdog_and_does_not_block",
            "unit/test_nccl.py::test_an_abort_does_not_ask_the_users_groups_to_end_the_process",
        ),
    ),
    6: Rule(
        "threads change the environment one after the other",
        (AT_ONCE, "unit/test_nccl.py::test_threads_change_the_environment_one_after_the_other"),
    ),
    7: Rule(
        "connecting ends at its deadline, and when the update is aborted",
        (
            ONE_FAILS,
            f"{WAITS}::test_connecting_to_a_peer_that_is_stopped_ends_and_stops_no_other_thread",
        ),
    ),
    8: Rule(
        "ranks whose settings of NCCL differ are refused, not connected",
        (
            f"{LIFE}::test_settings_by_which_nccl_would_hang_are_refused_with_the_cure",
            "unit/test_cluster_topology.py::test_an_nvlink_domain_of_several_hosts_is_one_host_to_nccl",
            "unit/test_cluster_topology.py::test_nccl_s_settings_have_to_agree_on_one_host",
        ),
    ),
    9: Rule(
        "a start of SGLang within a trainer rank leaves its environment as it was",
        ("unit/test_launch.py::test_an_embedded_engine_leaves_the_environment_as_it_was",),
    ),
    10: Rule(
        "memory that was freed and allocated again at its address is not taken for what it was",
        (
            SAME_ADDRESS,
            "unit/test_gpu_memory.py::test_memory_that_was_freed_and_allocated_again_at_its_address_gets_a_new_handle",
            "unit/test_gpu_memory.py::test_a_storage_of_another_size_is_changed",
            "verl/test_offload.py::test_megatrons_parameters_on_the_gpu_are_freed_after_the_sync",
        ),
    ),
    11: Rule(
        "a move is a few launches",
        (
            "unit/test_copy_kernel.py::test_sixty_thousand_boxes_are_one_launch",
            "unit/test_copy_kernel.py::test_the_kernel_copies_what_torch_copies",
        ),
    ),
    12: Rule(
        "copies of mixed dtypes and of more than 2^31 elements are exact",
        (
            "unit/test_copy_kernel.py::test_memory_that_kernels_do_not_reach_is_left_to_torch_by_pairs_of_dtypes",
            "unit/test_copy_kernel.py::test_more_than_31_bits_of_elements",
        ),
    ),
    13: Rule(
        "expandable segments are not mapped",
        (
            WITHOUT_HANDLES,
            "unit/test_cluster_topology.py::test_memory_without_handles_on_the_same_gpu_is_refused_with_the_cure",
            "unit/test_gpu_driver.py::test_memory_without_handles_is_told_though_it_is_mapped",
        ),
    ),
    14: Rule(
        "old memory is unmapped before new handles are opened",
        (SAME_ADDRESS, "unit/test_trainer_memory.py::test_old_memory_is_unmapped_before_a_new_handle_is_tried"),
    ),
    15: Rule(
        "memory without handles is announced as such, and sent",
        (WITHOUT_HANDLES, "unit/test_gpu_memory.py::test_memory_without_handles_is_published_with_the_reason"),
    ),
    16: Rule(
        "nothing is mapped any more when the trainer is answered",
        (
            FREED_AT_ONCE,
            "unit/test_engine_life.py::test_the_trainer_is_answered_after_every_engine_rank_has_unmapped",
        ),
    ),
    17: Rule(
        "what an engine rank does not use is returned to the GPU before it sleeps",
        (
            FREED_AT_ONCE,
            "unit/test_engine_life.py::test_memory_returns_to_the_gpu_only_for_a_trainer_that_needs_it",
        ),
    ),
    18: Rule(
        "work on the shards has ended on every GPU before others read them",
        (
            EVERY_SIZE,
            f"{HARNESS}::test_reading_from_a_gpu_that_was_not_synchronized_is_reported",
            "unit/test_gpu_memory.py::test_every_gpu_that_a_shard_is_on_is_waited_for_in_every_update",
            "unit/test_host_arena.py::test_nothing_is_copied_before_the_way_to_the_host_has_ended",
        ),
    ),
    19: Rule(
        "a staged update waits for what was given to the GPU before, and frees nothing under its own copies",
        (
            "unit/test_engine_life.py::test_an_own_stream_waits_for_all_others_first_and_for_itself_last",
            "unit/test_engine_life.py::test_buffers_are_freed_after_the_stream_that_writes_them_has_ended",
            "unit/test_engine_life.py::test_whatever_the_gpu_does_has_ended_before_live_weights_are_written",
        ),
    ),
    20: Rule(
        "seconds are those of copies that have ended, and memory outside of torch's allocator is reported",
        (
            "unit/test_engine_life.py::test_a_move_has_ended_when_its_seconds_are_taken",
            "unit/test_engine_life.py::test_memory_outside_of_torchs_allocator_is_reported_apart",
        ),
    ),
    21: Rule(
        "communicators that are in use at once find room on a GPU together",
        (
            AT_ONCE,
            f"{WAITS}::test_nine_engines_at_once_find_room_on_a_gpu_of_their_trainers",
            f"{HARNESS}::test_communicators_that_do_not_find_room_on_a_gpu_together_are_reported",
        ),
    ),
    22: Rule(
        "scales that DeepGEMM has requantized in place are requantized again",
        ("unit/test_patches.py::test_reordered_weights_are_reordered_again",),
    ),
    23: Rule(
        "pinned shards stay pinned",
        (
            f"{SHAPES}::test_offloaded_shards_are_read_from_host_memory_and_nothing_is_planned_anew",
            "unit/test_host_arena.py::test_pinned_shards_are_copied_whoever_has_them_and_the_others_are_moved_in_place",
        ),
    ),
    24: Rule(
        "no GPU is twice in one communicator",
        (
            OVER_HOSTS,
            f"{HARNESS}::test_a_gpu_twice_in_a_communicator_is_reported",
            "unit/test_p2p_groups.py::test_an_engine_over_two_of_four_trainer_hosts_has_a_communicator_for_each_of_its_hosts",
            "unit/test_p2p_several_groups.py::test_what_is_sent_over_several_communicators_is_exact",
        ),
    ),
}


def table() -> str:
    lines = ["| # | rule | a test that holds it |", "|---:|---|---|"]
    for number, rule in RULES.items():
        file, _, name = rule.tests[-1].partition("::")
        lines.append(f"| {number} | {rule.says} | `test/{file}`: {name.removeprefix('test_').replace('_', ' ')} |")
    return "\n".join(lines)


def test_the_table_of_the_document_is_up_to_date():
    assert marked.read(PAGE, NAME) == table()


def test_all_rules_are_listed():
    assert list(RULES) == list(range(1, 25))
    assert all(rule.tests for rule in RULES.values())


@pytest.mark.parametrize("test", sorted({test for rule in RULES.values() for test in rule.tests}))
def test_a_test_that_holds_a_rule_exists(test):
    file, _, name = test.partition("::")
    tree = ast.parse((TEST / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


if __name__ == "__main__":
    marked.write(PAGE, NAME, table())
