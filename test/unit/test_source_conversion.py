"""What a trainer's own conversion to checkpoint tensors slices out of its parameters is sent as slices of these.

`TitanAdapter` stands in for torchtitan's `StateDictAdapter`s of Qwen3-MoE: the interface and the names are theirs.
"""

import math
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import FusedTensor, checkpoint_tensors, describe
from support.dtensors import as_rank
from support.plans import assembled_states

EXPERTS, INNER, HIDDEN, VOCABULARY = 5, 4, 6, 7


PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
OTHERS = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "moe.router.gate.weight": "mlp.gate.weight",
}


class TitanAdapter:
    """Splits w1, w2 and w3 of [experts, ...], and renames: `layers.0.moe.experts.w1` is 5 tensors `gate_proj`."""

    def to_hf(self, state_dict):
        found = {}
        for key, value in state_dict.items():
            layer = re.fullmatch(r"layers\.(\d+)\.(.+)", key)
            if layer is None:
                found[OTHERS[key]] = value
                continue
            at, name = f"model.layers.{layer[1]}", layer[2]
            if not name.startswith("moe.experts."):
                found[f"{at}.{OTHERS[name]}"] = value
            elif isinstance(value, DTensor):
                raise AssertionError("the experts of this rank alone, under names that other ranks do not have")
            else:
                projection = PROJECTIONS[name.removeprefix("moe.experts.")]
                for e, expert in enumerate(torch.split(value, 1, dim=0)):
                    found[f"{at}.mlp.experts.{e}.{projection}.weight"] = expert.squeeze()
        return found


def titan_model():
    torch.manual_seed(0)
    model, layer = nn.Module(), nn.Module()
    model.tok_embeddings, model.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.RMSNorm(HIDDEN)
    layer.moe, layer.moe.experts, layer.moe.router = nn.Module(), nn.Module(), nn.Module()
    layer.moe.router.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
    for name, shape in {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}.items():
        setattr(layer.moe.experts, name, nn.Parameter(torch.randn(EXPERTS, *shape)))
    model.layers = nn.ModuleDict({"0": layer})  # by names, as torchtitan has them
    return model


def states_of(world, rows_of):
    states, given = [], []
    for rank in range(world):
        with as_rank(rank, world):
            given.append(rows_of(rank))
            states.append(describe(given[-1], trainer_rank=rank, global_ranks=tuple(range(world))))
    assert all(state.layout == states[0].layout for state in states)
    return states, given


def same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("world", [1, 2, 3])
def test_torchtitans_experts_over_fsdp2_are_what_to_hf_makes_of_the_whole_model(world):
    adapter, storages = TitanAdapter(), set()

    def rows(rank):
        model = titan_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        storages.update(p._local_tensor.untyped_storage().data_ptr() for p in model.parameters())
        return checkpoint_tensors(model, adapter.to_hf)

    states, given = states_of(world, rows)
    same(assembled_states(states), adapter.to_hf(dict(titan_model().named_parameters())))
    held = {s.untyped_storage().data_ptr() for state in states for s in state.shards if s.numel()}
    assert held <= storages, "nothing is copied"
    assert {len(row) for row in given[0]} == {2, 3}
    assert len(given[0]) == len(list(titan_model().parameters()))


PLACED = {
    "experts": ((2,), [Shard(0)]),
    "rows": ((3,), [Shard(1)]),
    "experts and columns, with replicas": ((2, 3, 2), [Shard(0), Shard(2), Replicate()]),
    "strided": ((2, 2), [_StridedShard(1, split_factor=2), Shard(1)]),
}


def halves(state):
    """gate and up of each expert are halves of one tensor, transposed: transformers' layout for some models."""
    found = {}
    for name, stacked in state.items():
        for e, expert in enumerate(stacked.unbind()):
            gate, up = expert.T.contiguous().chunk(2)
            found |= {f"{name}.{e}.gate": gate, f"{name}.{e}.up": up.clone()}
    return found


@pytest.mark.parametrize("placed", PLACED)
def test_slices_of_dtensors_with_any_placements(placed):
    mesh_shape, placements = PLACED[placed]
    whole = torch.randn(EXPERTS, HIDDEN, 2 * INNER, generator=torch.Generator().manual_seed(0))

    def rows(rank):
        mesh = init_device_mesh("cpu", mesh_shape)
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        return checkpoint_tensors({"experts": tensor}, halves)

    states, given = states_of(math.prod(mesh_shape), rows)
    for rank, (state, ((_, tensor, fused),)) in enumerate(zip(states, given, strict=True)):
        assert isinstance(fused, FusedTensor)
        assert [t.data_ptr() for t in state.inputs] == [tensor._local_tensor.data_ptr()]
        assert state.layout.local_bytes()[rank] == tensor._local_tensor.nbytes
    same(assembled_states(states), halves({"experts": whole}))


def test_a_tensor_under_two_names_is_passed_twice_as_it_is():
    w = torch.zeros(2, 3)
    rows = checkpoint_tensors(
        {"w": w, "s": torch.tensor(1.0)}, lambda s: {"embed": s["w"], "head": s["w"][:], "s": s["s"]}
    )
    assert [name for name, _ in rows] == ["embed", "head", "s"]
    assert rows[0][1] is rows[1][1] is w


def test_tensors_that_the_conversion_leaves_out_are_not_sent():
    assert [
        name for name, *_ in checkpoint_tensors({"a": torch.zeros(2), "b": torch.zeros(2)}, lambda s: {"x": s["a"]})
    ] == ["x"]


CURE = ". To send it, leave it out in `to_checkpoint`, convert it yourself"
STATE = {"a": torch.zeros(4, 6), "b": torch.zeros(4, 6)}


@pytest.mark.parametrize(
    ("convert", "says"),
    [
        (lambda s: {"norm": s["a"] + 1}, "the converter does arithmetic on norm"),
        (lambda s: {"cast": s["a"].bfloat16()}, "the converter reinterprets or casts cast"),
        (lambda s: {"qkv": torch.cat([s["a"], s["b"]])}, "the conversion joins a, b in qkv"),
        (lambda s: {"rope": s["a"].view(2, 2, 6).transpose(0, 1).reshape(4, 6)},
         r"makes rope of shape \(4, 6\), which is not a slice of a of shape \(4, 6\)"),
        (lambda s: {"odd": s["a"][::2]}, r"makes odd of shape \(2, 6\), which is not a slice of a"),
        (lambda s: {"flat": s["a"].flatten()}, r"makes flat of shape \(24,\), which is not a slice of a"),
        (lambda s: {"padded": torch.nn.functional.pad(s["a"], (0, 1))}, "makes padded of shape"),
        (lambda s: {"new": torch.zeros(2)}, "the conversion makes new of no tensor of the model"),
    ],
)  # fmt: skip
def test_what_is_no_slice_is_refused_by_name(convert, says):
    with pytest.raises(Unsupported, match=says) as refused:
        checkpoint_tensors(STATE, lambda state: {"first": state["b"], **convert(state)})
    assert CURE in str(refused.value)


def test_a_conversion_may_change_its_state_dict():
    """As prime-rl's `convert_to_hf` does."""

    def convert(state):
        for i, row in enumerate(state.pop("a")):
            state[f"a.{i}"] = row
        return state

    (whole, _), (name, tensor, fused) = checkpoint_tensors(STATE, convert)
    assert (whole, name) == ("b", "a")
    assert tensor is STATE["a"]
    assert [name for name, _ in fused.slices] == ["a.0", "a.1", "a.2", "a.3"]
    assert STATE.keys() == {"a", "b"}


def test_a_tensor_that_the_conversion_computes_can_be_passed_next_to_the_rest():
    rows = checkpoint_tensors(STATE, lambda state: {"b": state["b"][1:]})
    state = describe([*rows, ("norm", STATE["a"] + 1)], trainer_rank=0, global_ranks=(0,))
    assert [tensor.name for tensor in state.layout.tensors] == ["b", "norm"]


def test_a_conversion_that_looks_at_values_or_fails_is_refused():
    for convert in (lambda s: {"a": s["a"] if s["a"].any() else s["b"]}, lambda s: {"a": s["missing"]}):
        with pytest.raises(Unsupported, match="the conversion "):
            checkpoint_tensors(STATE, convert)


def test_models_without_a_conversion_are_refused_with_the_way_to_pass_one():
    for model in (titan_model(), STATE):
        with pytest.raises(Unsupported, match=r"is not a model of transformers.*to_checkpoint"):
            checkpoint_tensors(model)


def test_pieces_of_flat_buffers_are_refused_by_name():
    piece = torch.zeros(0)
    piece.ds_tensor = torch.zeros(3)
    with pytest.raises(Unsupported, match=r"experts lies in a flat buffer of FSDP1 or ZeRO-3.*FSDP2"):
        checkpoint_tensors({"experts": piece}, dict)
