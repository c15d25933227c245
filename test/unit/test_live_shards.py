"""What an engine rank's live memory holds of each checkpoint tensor, read back from its traced program."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.live_shards import live_shards, readable_shards
from sglang_reshard.trace.tracer import trace
from support.toy import ToyRank, checkpoint, shapes
from tools.oracle.replay import replay


def read_back(model, weights, rank=0):
    """Traces and replays; the shards, of which every box has been compared with the checkpoint's."""
    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in weights.items()]
    program = trace(model, specs)
    replay(program, weights)
    shards = live_shards(program, {spec.name: spec.shape for spec in specs}, rank)
    for shard in shards:
        for part in shard.sharding.shard_map.shards:
            assert part.ranks == (rank,)
            index = tuple(slice(a, a + n) for a, n in zip(part.local_start, part.box.shape, strict=True))
            wanted = weights[shard.name][part.box.slices()]
            assert torch.equal(shard.tensor[index], wanted.to(shard.tensor.dtype)), shard.name
    return {shard.name: shard for shard in shards}


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_all_ranks_together_hold_every_element(size, dtype):
    weights = checkpoint(1)
    held = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes().items()}
    for rank in range(size):
        for name, shard in read_back(ToyRank(rank, size, dtype), weights, rank).items():
            assert shard.sharding.shape == shapes()[name]
            for part in shard.sharding.shard_map.shards:
                held[name][part.box.slices()] = True
    assert all(mask.all() for mask in held.values())


class Loader(torch.nn.Module):
    """Loads one tensor of 6 x 4 elements, w, by a function."""

    def __init__(self, load, **parameters):
        super().__init__()
        self._load = load
        for name, shape in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights):
        for _, loaded in weights:
            self._load(self, loaded)


WEIGHTS = {"w": torch.arange(24.0).view(6, 4)}


def test_transposed_and_interleaved_copies_are_read_back():
    assert read_back(Loader(lambda m, w: m.p.copy_(w.t()), p=(4, 6)), WEIGHTS).keys() == {"w"}

    def apart(model, loaded):
        model.p[:3].copy_(loaded[::2])
        model.p[3:].copy_(loaded[1::2])

    shards = read_back(Loader(apart, p=(6, 4)), WEIGHTS)
    assert len(shards["w"].sharding.shard_map.shards) == 6  # rows are no longer neighbours


def test_operands_of_an_expression_are_read_from_scratch_memory():
    model = Loader(lambda m, w: m.p.copy_(w + 1), p=(6, 4))
    shards = read_back(model, WEIGHTS)
    assert torch.equal(shards["w"].tensor, WEIGHTS["w"])
    assert torch.equal(model.p, WEIGHTS["w"] + 1)


def test_what_a_step_has_changed_in_place_is_refused_by_name():
    def in_place(model, loaded):
        model.p.copy_(loaded)
        model.p.copy_(-torch.exp(model.p))

    with pytest.raises(Unsupported, match=r"engine rank 0: w cannot be read .* the loader computes p from it in place"):
        read_back(Loader(in_place, p=(6, 4)), WEIGHTS)


def test_parts_of_a_tensor_in_several_parameters_are_refused_by_name():
    def split(model, loaded):
        model.p.copy_(loaded[:3])
        model.q.copy_(loaded[3:])

    with pytest.raises(Unsupported, match="w cannot be read from the live weights: its parts are in p and q"):
        read_back(Loader(split, p=(3, 4), q=(3, 4)), WEIGHTS)


def test_what_is_also_converted_on_arrival_is_not_passed_on():
    """Another engine that reads it from here would not convert its part."""

    def load(model, loaded):
        model.a.data.copy_(loaded)
        model.b.data.copy_(loaded)

    program = trace(Loader(load, a=(6, 4), b=(6, 4)), [TensorSpec("w", (6, 4), "float32")])
    assert [shard.name for shard in readable_shards(program, {"w": (6, 4)}, 0)[0]] == ["w"]
    converting = replace(program, arrivals={"b": None})
    shards, why = readable_shards(converting, {"w": (6, 4)}, 0)
    assert (shards, list(why)) == ([], ["w"])
