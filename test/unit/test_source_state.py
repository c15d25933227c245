"""Tensors of every kind in a training state: read in place, or refused by name and trainer rank."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.sources import describe, tied_names
from support.dtensors import as_rank


def described(named, rank=0, size=2):
    with as_rank(rank, size):
        return describe(named() if callable(named) else named, trainer_rank=rank, global_ranks=tuple(range(size)))


def on_mesh(local, placements, shape=None):
    mesh = DeviceMesh("cpu", torch.arange(2))
    stride = torch.empty(shape, device="meta").stride() if shape else None
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2).parameters(), torch.ones(2, 2)])
def test_tensors_without_names_are_one_sentence(given):
    with pytest.raises(Mismatch, match=r"tensors without names; pass the model, model.named_parameters\(\) or"):
        described(given)


def test_shards_are_the_memory_itself():
    """Gradients, inference mode, 0-dim, no elements, any strides, a parameter, a view in a flat buffer."""
    flat = torch.arange(24.0)
    leaf = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        made_in_inference = torch.ones(3)
    tensors = {
        "needs grad": leaf,
        "has a graph": leaf.view(3, 1),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "inference": made_in_inference,
        "scalar": torch.tensor(2.0),
        "transposed": flat.view(4, 6).t(),
        "every other": flat[::2],
        "expanded": flat[:1].expand(5),
        "of another dtype": flat.view(torch.int32)[3:5],
    }
    state = described([*tensors.items(), ("none", torch.empty(0, 4))])
    for (name, tensor), shard in zip(tensors.items(), state.shards, strict=False):
        assert shard.data_ptr() == tensor.data_ptr(), name
        assert (shard.shape, shard.stride()) == (tensor.shape, tensor.stride()), name
        assert not shard.requires_grad, name
    assert [t.shape for t in state.layout.tensors][-1] == (0, 4)
    assert [p for p in state.layout.shard_map(state.layout.tensors[-1]).shards if p.box.numel] == []
    with torch.inference_mode():
        assert described(tensors.items()).shards[0].data_ptr() == leaf.data_ptr()


def test_dtensors_of_any_class_are_read_by_their_mesh():
    class Ours(DTensor):
        pass

    def given():
        parameter = torch.nn.Parameter(on_mesh(torch.ones(2, 3), [Shard(0)]))
        theirs = on_mesh(torch.ones(2, 3), [Shard(0)])
        ours = Ours(theirs._local_tensor, theirs._spec, requires_grad=False)
        assert type(ours) is Ours
        yield "parameter", parameter
        yield "subclass", ours
        yield "scalar", on_mesh(torch.tensor(1.0), [Replicate()])
        yield "none", on_mesh(torch.empty(2, 0), [Shard(0)])

    state = described(given)
    assert [t.shape for t in state.layout.tensors] == [(4, 3), (4, 3), (), (4, 0)]
    assert [tuple(s.shape) for s in state.shards] == [(2, 3), (2, 3), (), (2, 0)]


def test_async_collectives_are_waited_for():
    def given():
        sharded = on_mesh(torch.ones(2, 3), [Shard(0)])
        yield "w", sharded.redistribute(placements=[Replicate()], async_op=True)

    (shard,) = described(given).shards
    assert type(shard) is torch.Tensor
    assert shard.shape == (4, 3)


REFUSED = {
    "must be reduced first": (lambda: on_mesh(torch.zeros(2, 2), [Partial()]), Unsupported),
    "meta device": (lambda: torch.zeros(2, device="meta"), Unsupported),
    "on the meta device": (lambda: on_mesh(torch.zeros(2, 2, device="meta"), [Shard(0)]), Unsupported),
    "pass a dense one": (lambda: torch.zeros(2, 2).to_sparse(), Unsupported),
    "sparse_csr": (lambda: torch.zeros(2, 2).to_sparse_csr(), Unsupported),
    "complex64": (lambda: torch.zeros(2, dtype=torch.complex64), Unsupported),
    "qint8": (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), Unsupported),
    "wraps other tensors": (lambda: TwoTensor(torch.ones(2), torch.ones(2)), Unsupported),
    "opposite sign;": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, Unsupported),
    "was freed": (lambda: freed(torch.ones(3)), Unsupported),
    "NoneType": (lambda: None, Unsupported),
    "is a bytes, not a": (lambda: b"extra state", Unsupported),
    r"\(3, 2\).*\(2, 2\)": (lambda: on_mesh(torch.zeros(3, 2), [Shard(0)], torch.Size((4, 2))), Mismatch),
    "none of these participates": (
        lambda: DTensor.from_local(torch.ones(1), DeviceMesh("cpu", [2, 3]), [Shard(0)], run_check=False),
        Unsupported,
    ),
    "hold only 1 of its 2 elements": (
        lambda: DTensor.from_local(torch.ones(1), DeviceMesh("cpu", [1, 2]), [Shard(0)], run_check=False),
        Unsupported,
    ),
}


def freed(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("says", REFUSED)
def test_unsupported_tensors_are_refused_by_name_and_trainer_rank(says):
    make, error = REFUSED[says]
    with as_rank(1, 4), pytest.raises(error, match=says) as caught:
        describe([("layers.0.w", make())], trainer_rank=1, global_ranks=(0, 1))
    assert str(caught.value).startswith("trainer rank 1: layers.0.w")


# -- meshes


def as_dtensor(mesh):
    return (distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)], src_data_rank=None),)


def with_a_shard_spec(mesh):
    return torch.zeros(4), SimpleNamespace(full_shape=(4, 2), mesh=mesh, placements=(Shard(0),))


@pytest.mark.parametrize("given", [as_dtensor, with_a_shard_spec])
def test_a_tensor_on_the_tp_part_of_a_mesh_is_replicated_over_the_rest(given):
    layouts = []
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            state = describe([("w", *given(mesh["tp"]))], trainer_rank=rank, global_ranks=(0, 1, 2, 3))
            assert state.shards[0].shape == (2, 2)
            layouts.append(state.layout)
    assert all(layout == layouts[0] for layout in layouts)
    shards = layouts[0].shard_map(layouts[0].tensors[0]).shards
    assert [(p.box.start, p.ranks) for p in shards] == [((0, 0), (0, 2)), ((2, 0), (1, 3))]


def test_a_name_passed_twice_and_no_tensors_are_refused():
    with as_rank(0, 1):
        with pytest.raises(Mismatch, match="passed twice"):
            describe([("w", torch.zeros(1)), ("w", torch.zeros(1))], trainer_rank=0, global_ranks=(0,))
        with pytest.raises(Mismatch, match="no tensors"):
            describe([], trainer_rank=0, global_ranks=(0,))


# -- tied weights


def test_tied_tensors_are_one_memory():
    embed = torch.nn.Parameter(torch.ones(4, 3))
    named = [("embed", embed), ("norm", torch.ones(3)), ("head", embed), ("copy", embed.detach().clone())]
    state = described([*named, ("detached", embed.detach())])
    assert tied_names(state.layout, state.shards) == {"head": "embed", "detached": "embed"}
    assert state.shards[0].data_ptr() == state.shards[2].data_ptr()


def test_other_tensors_in_the_same_memory_are_not_tied():
    weight = torch.ones(4, 4)
    named = [
        ("w", weight),
        ("transposed", weight.t()),
        ("first row", weight[0]),
        ("other dtype", weight.view(torch.int32)),
        ("none", weight[:0]),
        ("none too", weight[:0]),
    ]
    state = described(named)
    assert tied_names(state.layout, state.shards) == {}


def test_the_same_memory_with_other_placements_is_not_tied():
    shard = torch.ones(2, 2)

    def given():
        yield "rows", on_mesh(shard, [Shard(0)])
        yield "columns", on_mesh(shard, [Shard(1)])
        yield "replicated", on_mesh(shard, [Replicate()])
        yield "tied", on_mesh(shard, [Shard(0)])

    state = described(given)
    assert tied_names(state.layout, state.shards) == {"tied": "rows"}
