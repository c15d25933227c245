"""A layout that cannot be is refused, with the name of the tensor that it cannot be of."""

import time

import numpy as np
import pytest
from msgspec.structs import replace

from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.shard_map import invalid_reason
from sglang_reshard.layout.source_layout import EXPLICIT
from sglang_reshard.protocol import validation
from sglang_reshard.protocol.validation import check_layout
from sglang_reshard.sources import Mesh, Placement, ShardMap, SourceLayout, SourceTensor
from support.stated import BIG, GOOD, rows, stated

ALL = rows((0, 2, (0,), 0), (2, 4, (1,), 0))
SPLIT = ((Placement(0),),)


def of_one(shape=(4, 3), dtype="float32", mesh=None, placements=SPLIT, numbers=(0, 0)):
    return SourceLayout(2, (mesh or Mesh((2,), (0, 1)),), placements, (SourceTensor("w", shape, dtype, *numbers),))


def test_honest_layouts_pass():
    check_layout(GOOD, 2)
    check_layout(stated(ALL), 2)
    check_layout(of_one(shape=(), placements=((Placement(),),)), 2)
    check_layout(of_one(shape=(0, 3)), 2)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (replace(GOOD, trainer_ranks=3), "describes 3 trainer ranks, but the update has 2"),
        (replace(GOOD, tensors=GOOD.tensors + GOOD.tensors[:1]), "lists tensor t0 twice"),
        (of_one(dtype="complex64"), "w: the dtype 'complex64' is not supported"),
        (of_one(shape=(4, -1)), r"w: the shape \(4, -1\)"),
        (of_one(shape=(4,) * 17), "w: the shape"),
        (of_one(shape=(BIG, 8)), "w: the shape .* more than"),
        (of_one(shape=(BIG, 0)), "w: the shape .* more than"),
        (of_one(numbers=(1, 0)), "w: the layout has no mesh number 1"),
        (of_one(numbers=(-2, 0)), "w: the layout has no mesh number -2"),
        (of_one(numbers=(0, -1)), "no placements number -1"),
        (of_one(numbers=(EXPLICIT, 0)), "no explicit sharding number 0"),
        (of_one(mesh=Mesh((3,), (0, 1))), r"w: its mesh of shape \(3,\) has 2 ranks"),
        (of_one(mesh=Mesh((2,), (0, 2))), "trainer ranks that are not in this update"),
        (of_one(mesh=Mesh((2,), (1, 1))), "a trainer rank twice"),
        (of_one(mesh=Mesh((0,), ())), "invalid number or size of dimensions"),
        (of_one(mesh=Mesh((2,), (0, -1))), "hold 6 of its 12 elements"),
        (of_one(placements=((),)), "0 placements on a mesh of 1 dimensions"),
        (of_one(placements=((Placement(2),),)), "shard other dimensions"),
        (of_one(placements=((Placement(-2),),)), "shard other dimensions"),
        (of_one(placements=((Placement(0, 0),),)), "into no parts"),
        (of_one(placements=((Placement(0, BIG),),)), "more than there are ranks or elements"),
        (of_one(shape=(BIG >> 8,), placements=((Placement(0, BIG >> 9),),)), "more than 4,194,304 intervals"),
        (stated(rows((0, 2, (0,), 0))), "hold 4 of its 8 elements"),
        (stated(rows((0, 3, (0,), 0), (2, 4, (1,), 0))), "overlap"),
        (stated(rows((0, 2, (0,), 0), (2, 5, (1,), 0))), "exceeds shape"),
        (stated(rows((0, 2, (0,), -1), (2, 4, (1,), 0))), "exceeds shape"),
        (stated(rows((0, 4, (), 0))), "distinct and ascending"),
        (stated(rows((0, 4, (1, 0), 0))), "distinct and ascending"),
        (stated(rows((0, 4, (0, 2), 0))), "outside the 2 trainer ranks"),
        (stated(ShardMap(ALL.shards * 50)), "100 shards, more than 99"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout, says, monkeypatch):
    monkeypatch.setattr(validation, "MAX_EXPLICIT_SHARDS", 99)
    digest, blob = pack_blob(layout)
    with pytest.raises(Mismatch, match=says):
        check_layout(unpack_blob(blob, SourceLayout, digest), 2)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_boxes_with_elements_in_common_are_found_wherever_they_are(dims):
    """Against each with each, in random grids of which one box was made larger, or none."""
    generator = np.random.default_rng(dims)
    for _ in range(40):
        cuts = [np.sort(generator.choice(np.arange(1, 30), 3, replace=False)) for _ in range(dims)]
        edges = [list(zip([0, *c], [*c, 30], strict=True)) for c in cuts]
        picked = np.stack(np.meshgrid(*(range(4) for _ in range(dims))), -1).reshape(-1, dims)
        boxes = [Box(*zip(*(edges[d][int(i)] for d, i in enumerate(index)), strict=True)) for index in picked]
        grown = int(generator.integers(len(boxes)))
        if generator.random() < 0.7:
            dim = int(generator.integers(dims))
            stop = tuple(min(30, n + 1) if d == dim else n for d, n in enumerate(map(int, boxes[grown].stop)))
            boxes[grown] = Box(boxes[grown].start, stop)
        clash = any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
        found = invalid_reason((30,) * dims, ShardMap.of((box, (0,) * dims, 0) for box in boxes), 1)
        assert bool(found and "overlap" in found) == clash


def test_many_stated_boxes_are_checked_in_time():
    """64 x 512 blocks of a matrix: each with each would take minutes."""
    held = [(Box((a, b), (a + 1, b + 1)), (0, 0), 0) for a in range(64) for b in range(512)]
    started = time.process_time()
    assert invalid_reason((64, 512), ShardMap.of(held), 1) == ""
    assert time.process_time() - started < 10
