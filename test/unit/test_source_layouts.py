"""What every trainer rank holds, put together, is the tensor: on real process groups, against torch's DTensor.

All shards of all holders are compared, so replicas are too. `full_tensor` may be called here and nowhere else.
"""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sglang_reshard.sources import describe
from support.layouts import BUILDERS
from support.sweep import only
from support.world import run_world


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def put_together(layout, shards_of_all, number):
    """The whole tensor number `number` from what all ranks hold, and whether each element came and holders agreed."""
    source = layout.tensors[number]
    whole = torch.zeros(source.shape, dtype=getattr(torch, source.dtype))
    times = torch.zeros(source.shape, dtype=torch.int64)
    for shard in layout.shard_map(source).shards:
        inside = tuple(slice(a, a + n) for a, n in zip(shard.local_start, shard.box.shape, strict=True))
        held = [shards_of_all[rank][number][inside] for rank in shard.ranks]
        if any(not torch.equal(bits(h), bits(held[0])) for h in held):
            return whole, "replicas differ"
        whole[shard.box.slices()] = held[0]
        times[shard.box.slices()] += 1
    return whole, "" if bool((times == 1).all()) else "not every element exactly once"


def sent_to_trainer_rank_0(state, trainer):
    """On trainer rank 0 every rank's layout and shards, rebuilt from bytes, which is quick, and local shapes."""
    gathered = [None] * trainer.size if trainer.rank == 0 else None
    mine = [bits(shard.detach()).numpy().tobytes() for shard in state.shards]
    dist.gather_object((state.layout, mine), gathered, dst=0)
    for rank, (layout, shards) in enumerate(gathered or ()):
        yield layout, [rebuilt(layout, tensor, rank, data) for tensor, data in zip(layout.tensors, shards, strict=True)]


def rebuilt(layout, tensor, rank, data):
    if not data:
        return torch.empty(0)
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, tensor.dtype))
    return flat.view(layout.shard_map(tensor).min_local_shape(rank))


def compare(trainer):
    """What is wrong, as (name, why), of all layouts of this number of ranks; on how many tensors."""
    logging.disable(logging.WARNING)  # torch tells how full_tensor could be faster
    cases = [case for builder in BUILDERS[trainer.size] for case in builder(trainer.size)]
    state = describe(
        [(case.name, case.tensor) for case in cases], trainer_rank=trainer.rank, global_ranks=tuple(range(trainer.size))
    )
    wrong = []
    everywhere = list(sent_to_trainer_rank_0(state, trainer))
    shards = [s for _, s in everywhere]
    for number, case in enumerate(cases):
        if trainer.rank == 0:
            whole, why = put_together(state.layout, shards, number)
            if why:
                wrong.append((case.name, why))
            if not torch.equal(bits(whole), bits(case.whole)):
                wrong.append((case.name, "not what was distributed"))
        if isinstance(case.tensor, DTensor):
            takes_part = case.tensor.device_mesh.get_coordinate() is not None
            if takes_part and case.full_tensor_works:
                full = case.tensor.detach().full_tensor()
                if not torch.equal(bits(full), bits(case.whole)):
                    wrong.append((case.name, "not full_tensor()"))
            local = case.tensor.detach().to_local()
            if local.numel() and state.shards[number].data_ptr() != local.data_ptr():
                wrong.append((case.name, "copied"))
    wrong += [("all", "layouts differ between ranks") for layout, _ in everywhere if layout != state.layout]
    return wrong, len(cases)


@pytest.mark.parametrize("ranks", only(sorted(BUILDERS), {3, 4, 8}.__contains__))
def test_the_shards_of_all_ranks_are_the_tensor(ranks):
    results, _ = run_world(ranks, 0, compare, None)
    for wrong, tensors in results:
        assert wrong == []
        assert tensors > 10
