"""Targets of `reshard` and of module receivers as `copy_` takes them: overlaps are refused, and autograd is told."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import ReshardPlan, reshard
from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.modules.receiver import StateDictModel
from sglang_reshard.layout.regions import Box, TensorSpec
from sglang_reshard.sources import ExplicitSharding, ShardMap
from sglang_reshard.trace.tracer import trace
from support.refusals import refusal_of
from support.world import run_world

RANKS = 2


def overlapping(trainer):
    """What is refused, and whether anything was written."""
    x, y = torch.arange(4.0), torch.arange(4.0) + 9
    memory = torch.zeros(6)
    one_ranks = (memory[:4], memory[2:]) if trainer.rank == 1 else (torch.zeros(4), torch.zeros(4))
    found = [
        refusal_of(lambda: reshard([("a", x), ("b", y)], [("a", memory[:4]), ("b", memory[:4])])),
        refusal_of(lambda: reshard([("a", x), ("b", y)], [("a", one_ranks[0]), ("b", one_ranks[1])])),
        refusal_of(lambda: reshard([("a", x)], [("a", memory[:1].expand(4))])),
    ]
    return found, bool(memory.any())


def test_overlaps_are_refused_on_all_ranks_before_a_byte_is_written():
    results, _ = run_world(RANKS, 0, overlapping, None)
    assert results[0] == results[1]
    (whole, part, expanded), written = results[0]
    assert not written
    assert whole[0] == part[0] == expanded[0] == "Mismatch"
    assert "trainer rank 0: a and b of the target share memory" in whole[1]
    assert "trainer rank 1: a and b of the target share memory" in part[1]
    assert "a of the target has elements that share memory" in expanded[1]


def tied(trainer):
    """Names of one tensor on both sides; rank 1 holds nothing of the source. And names that are tied in the target."""
    x = torch.arange(4.0) if trainer.rank == 0 else None
    target = torch.zeros(4)
    source = [("a", x), ("b", x[:])] if trainer.rank == 0 else None
    group = dist.group.WORLD
    plan = ReshardPlan.make(held_by_first(source), [("a", target), ("b", target)], group)
    plan.run()
    apart = [("a", x), ("b", x.clone())] if trainer.rank == 0 else None
    return (
        target.tolist(),
        plan.received_bytes,
        refusal_of(lambda: reshard(held_by_first(apart), [("a", target), ("b", target)], group)),
    )


def held_by_first(source):
    """The source as rank 0 states it alone."""
    if source is None:
        return None
    sharding = ExplicitSharding((4,), ShardMap.of([(Box((0,), (4,)), (0,), 0)]))
    return [(name, tensor, sharding) for name, tensor in source]


def test_tied_names_are_one_tensor_on_both_sides_and_sent_once():
    results, _ = run_world(RANKS, 0, tied, None)
    for values, _, refused in results:
        assert values == [0, 1, 2, 3]
        assert refused[0] == "Mismatch"
        assert "a and b of the target share memory" in refused[1]
    assert [received for _, received, _ in results] == [0, 16]


def counted(trainer):
    """The versions that runs of a plan add to each target, and what a backward over two of them says."""
    mesh = init_device_mesh("cpu", (trainer.size,))
    module = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
    with torch.inference_mode():
        unversioned = torch.zeros(4)
    buffer = torch.zeros(8)
    targets = {
        "leaf": nn.Parameter(torch.zeros(4)),
        "dtensor": nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)),
        "view": buffer[2:6],
        "fsdp": module.weight,
        "inference": unversioned,
    }
    source = {name: torch.arange(float(t.numel())).view(t.shape) + 1 for name, t in targets.items()}
    plan = ReshardPlan.make(source.items(), targets.items())
    losses = [(targets[name] * targets[name]).sum() for name in ("leaf", "dtensor")]
    before = {name: t._version for name, t in targets.items() if name != "inference"}
    plan.run()
    plan.run()
    added = {name: targets[name]._version - version for name, version in before.items()}
    whole = all(torch.equal(getattr(t, "full_tensor", lambda t=t: t)().detach(), source[n]) for n, t in targets.items())
    return added, whole, [refused_backward(loss) for loss in losses], buffer._version


def refused_backward(loss):
    with pytest.raises(RuntimeError) as refused:
        loss.backward()
    return str(refused.value)


def test_each_run_is_a_write_to_autograd():
    results, _ = run_world(RANKS, 0, counted, None)
    for added, whole, says, of_base in results:
        assert added == {"leaf": 2, "dtensor": 2, "view": 2, "fsdp": 2}
        assert whole
        assert of_base == 2
        assert all("modified by an inplace operation" in message for message in says)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("memory", torch.zeros(4))
        self.register_buffer("part", self.memory[1:])
        self.register_buffer("wide", torch.zeros(1).expand(3))


def program_of(names, ignored=()):
    model = StateDictModel(Model(), strict=False)
    model.loads.ignored = ignored
    shapes = {name: tuple(t.shape) for name, t in Model().state_dict().items()}
    return model, trace(model, [TensorSpec(name, shapes[name], "float32") for name in names])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("embed.weight", "head.weight"), "embed.weight and head.weight of the receiver's module share memory"),
        (("embed.weight", "memory", "part"), "memory and part of the receiver's module share memory"),
        (("embed.weight", "memory", "wide"), "wide of the receiver's module has elements that share memory"),
    ],
)
def test_a_receiver_refuses_entries_that_share_memory(names, message):
    with pytest.raises(Mismatch, match=message):
        program_of(names)


@pytest.mark.parametrize("tied_name", ["head.weight", "embed.weight"])
def test_a_receiver_takes_one_of_tied_names(tied_name):
    other = {"head.weight", "embed.weight"} - {tied_name}
    model, program = program_of(("embed.weight", "head.weight", "memory"), (tied_name,))
    assert {copy.source for copy in program.copies} == {*other, "memory"}
    assert {name for name, _ in model.loads.written} == {*other, "memory"}
    traced_for = model.goes_by()
    model.loads.ignored = ()  # they are no longer tied: what was traced is not used again
    assert model.goes_by() != traced_for
    before = model.module.embed.weight._version, model.module.memory._version
    model.count_write()
    model.count_write()
    assert (model.module.embed.weight._version, model.module.memory._version) == tuple(n + 2 for n in before)
