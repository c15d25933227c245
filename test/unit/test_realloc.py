"""What a move refuses before a byte is written, and whose replicas it reads, in one process."""

import numpy as np
import pytest
import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.realloc.memory import UsedMemory, check_not_overwritten, same_memory
from sglang_reshard.extras.realloc.rank_plan import (
    Demand,
    check_all_listed,
    listed_bits,
    plan_target_reads,
    sent_matrix,
    target_program,
)
from sglang_reshard.layout.regions import Box
from sglang_reshard.plan import TensorIndex
from sglang_reshard.sources import ExplicitSharding, ShardMap, describe

RANK, RANKS = 0, (0, 1, 2, 3)


def state(*tensors):
    return describe(tensors, trainer_rank=RANK, global_ranks=RANKS)


def index_of(*tensors):
    return TensorIndex.of(state(*tensors).layout)


SOURCE = (("a", torch.zeros(4, 6)), ("b", torch.zeros(3)))


def test_source_tensors_that_no_target_has_are_named_with_a_few_others():
    index = index_of(*((f"t{i:02}", torch.zeros(1)) for i in range(11)))
    programs = [target_program(index, state((name, torch.zeros(1))), RANK, strict=True) for name in ("t00", "t01")]
    demands = [Demand(listed_bits(index, program), {}, {}) for program in programs]
    with pytest.raises(
        Mismatch, match=r"has 9 tensors that are in no trainer rank's target: t02, .* and 4 more\. Pass"
    ):
        check_all_listed(index, demands)


def test_replicas_send_even_shares_and_the_own_host_comes_first():
    """Ranks 1, 2 and 3 have all; rank 0 shares a host with 2 and 3."""
    whole = ShardMap.of((Box((0,), (8,)), (0,), rank) for rank in (1, 2, 3))
    tensors = tuple((f"t{i}", torch.empty(0), ExplicitSharding((8,), whole)) for i in range(10))
    index = index_of(*tensors)
    program = target_program(index, state(*((f"t{i}", torch.zeros(8)) for i in range(10))), RANK, strict=True)
    reads = plan_target_reads(index, program, RANK, ("here", "there", "here", "here"))
    assert reads.traffic() == {2: (160, 5), 3: (160, 5)}
    demands = [Demand(b"", {peer: nbytes for peer, (nbytes, _) in reads.traffic().items()}, {}), Demand(b"", {}, {})]
    assert sent_matrix([*demands, *demands[1:] * 2]).tolist() == [[0] * 4, [0] * 4, [160, 0, 0, 0], [160, 0, 0, 0]]


def test_a_rank_reads_itself_before_its_host():
    index = index_of(*SOURCE)  # plain: whole on every rank
    program = target_program(index, state(*SOURCE), RANK, strict=True)
    assert set(plan_target_reads(index, program, RANK, ("here",) * 4).traffic()) == {RANK}


def test_the_same_memory_is_the_same_elements_in_the_same_order():
    memory = torch.zeros(4, 4)
    assert same_memory(memory[1:2], memory[1:3][:1])
    assert same_memory(memory[:, :1].t(), memory.view(16)[::4].view(1, 4))
    assert not same_memory(memory, memory.t())
    assert not same_memory(memory, memory.view(torch.int32))
    assert not same_memory(memory[0], memory[1])


def test_a_write_into_the_source_is_refused_to_the_byte():
    memory = torch.zeros(4, 6)
    rows, others = memory[::2], memory[1::2]  # interleaved
    check_not_overwritten([("a", rows)], [others], RANK)
    with pytest.raises(Mismatch, match="trainer rank 0: the source's a shares memory with the target"):
        check_not_overwritten([("b", torch.zeros(3)), ("a", rows)], [others, memory[2, 5:]], RANK)
    with pytest.raises(Mismatch, match="the source's a shares memory"):
        check_not_overwritten([("a", rows)], [memory.view(torch.uint8)[0, 3:4]], RANK)


def test_memory_that_cannot_be_freed_is_named():
    target = torch.zeros(8)
    numpys = UsedMemory([("n", torch.from_numpy(np.zeros(3)))], [("a", target)], RANK)
    assert numpys.problem(drop=False) is None
    assert "torch did not allocate the memory of n" in str(numpys.problem(drop=True))
