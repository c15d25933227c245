"""Every trainer rank finds out what its own parameters hold, and states it."""

from dataclasses import replace

import pytest
import torch

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import Conversion, ShardBox, TracedParameters
from support.moves import elsewhere
from support.partial_states import of_all_ranks


def parameters_of(*conversions, rank=0, ranks=1):
    return TracedParameters(conversions, trainer_rank=rank, trainer_ranks=ranks)


def held_by(*ranks):
    """The shards of each tensor, given each rank's conversions."""
    given = [parameters_of(*conversions, ranks=len(ranks)).tensors() for conversions in ranks]
    layout = of_all_ranks(given)[0].layout
    return {tensor.name: layout.shard_map(tensor).shards for tensor in layout.tensors}


def rows(name, rank, size, of=2):
    """A parameter that is `rank`'s rows of a tensor of `size` columns on `of` ranks."""

    def convert(shard):
        return {name: torch.cat([shard if r == rank else elsewhere(shard) for r in range(of)])}

    return Conversion(f"megatron.{name}", torch.full((2, size), float(rank)), convert)


def whole(name, tensor):
    return Conversion(f"megatron.{name}", tensor, lambda shard: {name: shard})


def test_replicas_are_one_piece_unless_they_are_at_different_places():
    def second_half(shard):
        return {"t": shard.chunk(2)[1]}

    same = held_by(*([whole("t", torch.ones(2, 3))] for _ in range(3)))
    assert same["t"] == (ShardBox(Box((0, 0), (2, 3)), (0, 1, 2), (0, 0)),)
    moved = held_by([whole("t", torch.ones(2, 3))], [Conversion("fused", torch.ones(4, 3), second_half)])
    assert moved["t"] == (
        ShardBox(Box((0, 0), (2, 3)), (0,), (0, 0)),
        ShardBox(Box((0, 0), (2, 3)), (1,), (2, 0)),
    )


def tied(conversion):
    return replace(conversion, tied=True)


def test_of_two_tied_parameters_of_one_rank_the_first_is_read():
    def second_half(shard):
        return {"t": shard.chunk(2)[1]}

    first, second = torch.ones(2, 3), torch.ones(4, 3)
    parameters = parameters_of(tied(whole("t", first)), tied(Conversion("head", second, second_half)))
    ((_, tensor, held),) = parameters.tensors()
    assert tensor.data_ptr() == first.data_ptr()
    assert parameters.parameters == [first]
    assert held.shard_map.shards == (ShardBox(Box((0, 0), (2, 3)), (0,), (0, 0)),)


def test_later_only_the_parameters_memory_is_looked_up():
    """In a larger buffer, too, which it is a part of."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    asked = []

    def convert(shard):
        asked.append(shard)
        return {"rows": shard, "columns": shard.permute(1, 0)}

    parameters = parameters_of(Conversion("linear", parameter, convert))
    (_, _, first), (_, _, second) = parameters.tensors()
    times = len(asked)
    buffer = torch.arange(20.0)
    parameter.data = buffer[7:13].view(2, 3)
    (_, rows_, first_again), (_, columns, second_again) = parameters.tensors()
    assert torch.equal(rows_, buffer[7:13].view(2, 3))
    assert torch.equal(columns, buffer[7:13].view(2, 3).t())
    assert (first_again, second_again) == (first, second)
    assert first_again is first
    assert second_again is second
    assert len(asked) == times


def test_tensors_alike_but_for_their_names_share_what_is_said_of_them():
    experts = [whole(f"expert.{i}", torch.zeros(3, 3)) for i in range(5)]
    parameters = parameters_of(*experts)
    assert len({id(held) for _, _, held in parameters.tensors()}) == 1


def failing(shard):
    raise ValueError("it asked a process group for its members")


@pytest.mark.parametrize(
    ("conversions", "why"),
    [
        (
            [Conversion("norm", torch.ones(3), lambda shard: {"t": shard + 1})],
            "norm .*: the converter does arithmetic on t",
        ),
        ([Conversion("norm", torch.ones(3), failing)], "norm .*: ValueError: it asked"),
        (
            [Conversion("norm", torch.ones(3, 2).t(), lambda shard: {"t": shard})],
            "norm .*: it is a Tensor with strides",
        ),
        (
            [whole("t", torch.ones(3)), tied(whole("t", torch.ones(3)))],
            "another parameter, to which it is not tied",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(conversions, why):
    with pytest.raises(Unsupported, match=f"^trainer rank 1: .*{why}"):
        parameters_of(*conversions, rank=1, ranks=2)


@pytest.mark.parametrize(
    ("ranks", "error", "why"),
    [
        (
            [[whole("t", torch.ones(3))], [whole("t", torch.ones(3, dtype=torch.bfloat16))]],
            Mismatch,
            r"t is float32 \(3,\) on trainer rank 0, but bfloat16 \(3,\) on trainer rank 1",
        ),
        (
            [[rows("t", 0, 3)], [whole("u", torch.ones(3))]],
            Unsupported,
            r"ranks \[0\] list it, and 6 of its 12",
        ),
        (
            [[tied(whole("t", torch.ones(4, 3)))], [tied(rows("t", 0, 3))], [tied(rows("t", 1, 3))]],
            Mismatch,
            "t: the trainer ranks that list it hold parts that do not go together",
        ),
    ],
)
def test_what_does_not_make_whole_tensors_is_refused(ranks, error, why):
    with pytest.raises(error, match=why):
        held_by(*ranks)


def test_what_is_computed_of_a_whole_parameter_is_sent_as_a_copy():
    """As of norms that a trainer stores less one."""
    weight = torch.arange(3.0)
    parameters = parameters_of(Conversion("norm", weight, lambda shard: {"t": shard + 1}, whole=True))
    ((_, first, held),) = parameters.tensors()
    assert torch.equal(first, torch.tensor([1.0, 2, 3]))
    assert held.shard_map.shards == (ShardBox(Box((0,), (3,)), (0,), (0,)),)
    weight.mul_(10)
    ((_, second, _),) = parameters.tensors()
    assert torch.equal(second, torch.tensor([1.0, 11, 21]))
    assert second.data_ptr() == first.data_ptr()
    assert parameters.parameters == [weight]


def test_what_is_computed_with_elements_of_other_ranks_is_refused():
    def convert(shard):
        return {"t": torch.cat([shard, torch.full_like(shard, float("nan"))]) + 1}

    with pytest.raises(Unsupported, match=r"norm .* with elements of other trainer ranks"):
        parameters_of(Conversion("norm", torch.ones(3), convert, whole=True))
