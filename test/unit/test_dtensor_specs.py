"""What a DTensor's spec says beyond mesh and placements is read, or refused by name: nothing of it is passed over."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import describe
from sglang_reshard.sources.memory_identity import MemoryIdentity
from support.dtensors import as_rank

WHOLE = torch.arange(16.0).view(8, 2)
META = TensorMeta(WHOLE.shape, WHOLE.stride(), WHOLE.dtype)
REVERSED = (ShardOrderEntry(0, (1, 0)),)
BOTH = (Shard(0), Shard(0))


@pytest.fixture
def mesh():
    with as_rank(1, 4):
        yield init_device_mesh("cpu", (2, 2))


def read(tensor, **options):
    return describe([("w", tensor)], trainer_rank=1, global_ranks=(0, 1, 2, 3), **options)


def rows_of(state, rank):
    (tensor,) = state.layout.tensors
    return [(shard.box.start[0], shard.box.stop[0]) for shard in state.layout.shard_map(tensor).shards_of(rank)]


def of_spec(mesh, placements=BOTH, kind=DTensorSpec, **fields):
    return DTensor(WHOLE[2:4], kind(mesh, placements, META, **fields), requires_grad=False)


@dataclasses.dataclass
class FutureSpec(DTensorSpec):
    """Of a torch that says more."""

    ragged_rows: tuple[int, ...] = ()

    def __hash__(self):
        return id(self)


def test_a_field_that_is_not_known_is_refused_unless_it_has_its_default(mesh):
    assert rows_of(read(of_spec(mesh, kind=FutureSpec)), 1) == [(2, 4)]
    with pytest.raises(Unsupported, match=r"trainer rank 1: w has a FutureSpec whose field ragged_rows is \(5, 3\)"):
        read(of_spec(mesh, kind=FutureSpec, ragged_rows=(5, 3)))


def test_an_attribute_that_somebody_has_set_is_refused(mesh):
    tensor = of_spec(mesh)
    tensor._spec.offsets = (1, 7)
    with pytest.raises(Unsupported, match=r"field offsets is \(1, 7\)"):
        read(tensor)


class Ragged(Shard):
    """Equal to Shard for whoever asks, and shards in another way."""


def test_a_placement_derived_from_a_known_one_is_not_taken_for_it(mesh):
    tensors = [("a", of_spec(mesh)), ("b", of_spec(mesh, (Ragged(0), Shard(0))))]
    with pytest.raises(Unsupported, match=r"trainer rank 1: b has the placement .*Ragged"):
        describe(tensors, trainer_rank=1, global_ranks=(0, 1, 2, 3))


def test_an_order_that_strides_and_spec_both_state_is_taken(mesh):
    """As torch 2.10 does for FSDP2 over tensor parallelism."""
    tensor = of_spec(mesh, (_StridedShard(0, split_factor=2), Shard(0)))
    object.__setattr__(tensor._spec, "shard_order", (ShardOrderEntry(0, (1, 0)),))
    found = read(tensor)
    assert [rows_of(found, rank) for rank in range(4)] == [[(0, 2)], [(4, 6)], [(2, 4)], [(6, 8)]]


@pytest.mark.parametrize(
    ("placements", "order"),
    [((_StridedShard(0, split_factor=4), Shard(0)), (1, 0)), (BOTH, (1,))],
    ids=["of other strides", "of other placements"],
)
def test_an_order_that_does_not_go_with_the_placements_is_refused(mesh, placements, order):
    tensor = of_spec(mesh, placements)
    object.__setattr__(tensor._spec, "shard_order", (ShardOrderEntry(0, order),))
    with pytest.raises(Unsupported, match="which do not go together"):
        read(tensor)


def test_dimensions_counted_from_the_last_are_refused(mesh):
    spec = SimpleNamespace(full_shape=(8, 2), mesh=mesh, placements=(Shard(-2), Replicate()))
    with pytest.raises(Unsupported, match=r"placement Shard\(dim=-2\) with a negative dimension"):
        describe([("w", WHOLE[:4], spec)], trainer_rank=1, global_ranks=(0, 1, 2, 3))


def test_a_name_that_is_no_string_is_refused(mesh):
    with pytest.raises(Unsupported, match=r"trainer rank 1: 7: a name must be a string, not a int"):
        describe([(7, WHOLE)], trainer_rank=1, global_ranks=(0, 1, 2, 3))


def test_another_order_of_the_same_memory_is_a_change(mesh):
    tensor = of_spec(mesh)
    listed = [("w", tensor)]
    detector = MemoryIdentity(listed)
    assert detector.unchanged(listed)
    other = of_spec(mesh, shard_order=REVERSED)._spec
    assert not detector.unchanged([("w", DTensor(tensor._local_tensor, other, requires_grad=False))])
    tensor._spec.shard_order = REVERSED
    assert not detector.unchanged(listed)


def test_megatron_writes_its_order_on_the_mesh(mesh):
    mesh._shard_order = [1, 0]
    assert [rows_of(read(of_spec(mesh)), rank) for rank in range(4)] == [[(0, 2)], [(4, 6)], [(2, 4)], [(6, 8)]]


def chunk(start, sizes):
    return SimpleNamespace(offsets=torch.Size(start), sizes=torch.Size(sizes))


def uneven(mesh, start, local):
    """As Megatron-FSDP's: the local tensor says where it is."""
    local.__create_chunk_list__ = lambda: [chunk(start, local.shape)]
    return DTensor(local, DTensorSpec(mesh, (Shard(0), Replicate()), META), requires_grad=False)


def test_a_local_tensor_that_states_its_part_is_believed(mesh):
    state = read(uneven(mesh, (1, 0), WHOLE[1:4].clone()), partial=True)
    (tensor,) = state.layout.tensors
    (shard,) = state.layout.shard_map(tensor).shards
    assert (shard.box, shard.ranks) == (Box((1, 0), (4, 2)), (1,))
    assert torch.equal(state.shards[0], WHOLE[1:4])
    even = read(uneven(mesh, (0, 0), WHOLE[:4].clone()))  # as placements have it: all ranks know it
    assert rows_of(even, 3) == [(4, 8)]
    assert read(uneven(mesh, (0, 0), WHOLE[:0].clone()), partial=True).shards[0].numel() == 0


def test_a_part_that_other_ranks_cannot_know_needs_partial(mesh):
    with pytest.raises(
        Unsupported, match=r"trainer rank 1: w is an uneven DTensor.*Pass partial=True.*ExplicitSharding"
    ):
        read(uneven(mesh, (4, 0), WHOLE[:4].clone()))


@pytest.mark.parametrize("start", [(6, 0), (-1, 0), (0, 1), (0,)])
def test_a_part_outside_of_the_tensor_is_refused(mesh, start):
    with pytest.raises(Mismatch, match=r"rank 1: w has a local tensor of shape \(4, 2\), but states the chunk"):
        read(uneven(mesh, start, WHOLE[:4].clone()), partial=True)
