"""Slices of fused tensors, determined by tracing the converter over a row without data."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import FusedSlice, describe, fused_slices
from support.dtensors import as_rank

EXPERTS, INNER, HIDDEN = 3, 4, 5
SHAPE = (EXPERTS, 2 * INNER, HIDDEN)
GATE_UP = [(f"experts.{e}.{name}.weight", (INNER, HIDDEN)) for e in range(EXPERTS) for name in ("gate", "up")]


def gate_up(make):
    """Returns a converter of experts whose halves go through `make`."""

    def convert(first, segment):
        for i in range(segment.shape[0]):
            for name, half in zip(("gate", "up"), segment.chunk(2, dim=1), strict=True):
                yield f"experts.{first + i}.{name}.weight", make(half[i])

    return lambda first, segment: list(convert(first, segment))


def expected(axes=(1, 2)):
    return tuple(
        (name, FusedSlice((i // 2, i % 2 * INNER, 0), (i // 2 + 1, (i % 2 + 1) * INNER, HIDDEN), axes))
        for i, (name, _) in enumerate(GATE_UP)
    )


def test_without_a_converter_each_row_is_a_tensor():
    names = [(f"experts.{e}.down", (2 * INNER, HIDDEN)) for e in range(EXPERTS)]
    assert fused_slices(names, SHAPE) == tuple(
        (name, FusedSlice((e, 0, 0), (e + 1, 2 * INNER, HIDDEN), (1, 2))) for e, (name, _) in enumerate(names)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda half: half, lambda half: half.to("cpu", non_blocking=True), lambda half: half.clone(),
        lambda half: half.contiguous(), lambda half: half.detach().to(torch.bfloat16), lambda half: half[None][0],
        torch.t, lambda half: half.t().contiguous(),
        lambda half: half.t().clone().flatten().view(HIDDEN, INNER),  # a copy that is then taken for contiguous
        lambda half: torch.stack(list(half.t())), lambda half: half.new_empty(HIDDEN, INNER).copy_(half.t()),
    ],
)  # fmt: skip
def test_converters_that_take_transpose_or_move_data(make):
    seen = []
    convert = gate_up(make)

    def counted(first, segment):
        seen.append((first, tuple(segment.shape), segment.device.type))
        return convert(first, segment)

    turned = make(torch.zeros(INNER, HIDDEN, dtype=torch.bfloat16)).shape == (HIDDEN, INNER)
    names = [(name, shape[::-1] if turned else shape) for name, shape in GATE_UP]
    assert fused_slices(names, SHAPE, counted) == expected((2, 1) if turned else (1, 2))
    assert seen == [(0, (1, *SHAPE[1:]), "meta")], "one row, once"


def test_a_slice_that_keeps_the_dimension_of_the_rows():
    names = [(f"experts.{e}", (1, 2 * INNER, HIDDEN)) for e in range(EXPERTS)]
    parts = fused_slices(names, SHAPE, lambda first, segment: [(f"experts.{first}", segment)])
    assert [part.axes for _, part in parts] == [(0, 1, 2)] * EXPERTS


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda half: half * 2, "does arithmetic on experts.0.gate.weight; .* Pass the checkpoint tensors separately"),
        (lambda half: half.add_(1), "does arithmetic on experts.0.gate.weight"),
        (lambda half: half.flip(0), "does arithmetic on experts.0.gate.weight"),
        (lambda half: half.float(), "reinterprets or casts experts.0.gate.weight"),
        (
            lambda half: torch.cat([half[:, 2:], half[:, :2]], 1),
            r"reorders experts.0.gate.weight: it is not a slice of a row of shape \(1, 8, 5\)",
        ),
        (lambda half: half.new_zeros(INNER, HIDDEN), "computes or reorders experts.0.gate.weight"),
        (lambda half: torch.from_numpy(half.numpy()), "does not run on a tensor of shape .* without data"),
        (lambda half: half.sigmoid_().nope, "does not run on a tensor of shape .* without data"),
    ],
)
def test_converters_that_compute_or_reorder_are_refused(make, says):
    with pytest.raises(Unsupported, match=says):
        fused_slices(GATE_UP, SHAPE, gate_up(make))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (GATE_UP[:-1], "got 5 names, but the converter returns 2 tensors for each of 3 rows"),
        ([], "got 0 names"),
        (
            [*GATE_UP[:2], *GATE_UP[2:4][::-1], *GATE_UP[4:]],
            "experts.1.up.weight of .* returns experts.0.gate.weight",
        ),
        ([*GATE_UP[2:4], *GATE_UP[2:]], "experts.1.gate.weight of shape"),
        ([*GATE_UP[:5], (GATE_UP[5][0], (INNER, 1))], r"experts.2.up.weight of shape \(4, 1\)"),
    ],
)
def test_names_that_the_converter_does_not_return_are_refused(names, says):
    with pytest.raises(Unsupported, match=says):
        fused_slices(names, SHAPE, gate_up(lambda half: half))


def test_numbers_that_tell_tensors_of_a_row_apart_are_no_rows():
    """Mixtral's: w1 and w3 have one shape, and differ in a number only."""

    def convert(first, segment):
        w1, w3 = segment[0].chunk(2)
        return [(f"experts.{first}.w1.weight", w1), (f"experts.{first}.w3.weight", w3)]

    listed = [(f"experts.{e}.w{n}.weight", (INNER, HIDDEN)) for e in range(EXPERTS) for n in (1, 3)]
    assert [name for name, _ in fused_slices(listed, SHAPE, convert)] == [name for name, _ in listed]
    for row in (1, 2):
        swapped = list(listed)
        swapped[2 * row : 2 * row + 2] = listed[2 * row : 2 * row + 2][::-1]
        with pytest.raises(Unsupported, match=rf"experts\.{row}\.w1\.weight of shape"):
            fused_slices(swapped, SHAPE, convert)


# -- ShardSpecs of fused tensors


def spec(**more):
    return SimpleNamespace(**{"full_shape": SHAPE, "mesh": None, "placements": None, "place": None, **more})


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_spec_with_slots_is_a_fused_tensor(rank):
    whole = torch.arange(120.0).view(SHAPE)
    with as_rank(rank, 2):
        of_mesh = spec(
            mesh=DeviceMesh("cpu", [0, 1]),
            placements=(Shard(0),),
            hf_slots=GATE_UP,
            to_hf_chunk=gate_up(lambda half: half.to("cpu")),
        )
        local = whole.chunk(2)[rank]
        state = describe([("stack", local.flatten(), of_mesh)], trainer_rank=rank, global_ranks=(0, 1))
    assert [t.name for t in state.layout.tensors] == [name for name, _ in GATE_UP]
    for i, shard in enumerate(state.shards):
        e, first = i // 2, i % 2 * INNER
        assert torch.equal(shard, whole[e, first : first + INNER]) if (e < 2) == (rank == 0) else shard.numel() == 0


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"place": 0, "hf_slots": GATE_UP}, r"explicit `place`.*sglang_reshard\.verl exchanges"),
        ({"to_hf_chunk": gate_up(lambda half: half)}, "`to_hf_chunk` without `hf_slots`"),
        ({"hf_slots": GATE_UP}, "got 6 names, but"),
    ],
)
def test_incomplete_shard_specs_are_refused_by_name_and_trainer_rank(more, says):
    with as_rank(1, 2), pytest.raises(Unsupported, match=f"^trainer rank 1: stack: .*{says}"):
        describe([("stack", torch.zeros(120), spec(**more))], trainer_rank=1, global_ranks=(0, 1))
