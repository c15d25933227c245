"""Checksums of trainer and engine ranks agree, and any difference is detected and named."""

import zlib

import msgspec
import numpy as np
import pytest
import torch

from sglang_reshard.errors import Mismatch
from sglang_reshard.landings.checked import regions, whole_model
from sglang_reshard.landings.checked.regions import RegionKind, RegionSet, Selection
from sglang_reshard.landings.checked.source import SourceChecksums
from sglang_reshard.landings.checked.target import TargetChecksums
from sglang_reshard.layout.decoders import pack_blob
from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.plan import TensorIndex
from sglang_reshard.protocol.messages import decode, encode
from sglang_reshard.sources import Mesh, Placement, SourceLayout, SourceTensor
from sglang_reshard.trace.program import Copy, Program
from sglang_reshard.trace.tracer import trace
from support.plans import expected_of, shards, wanted
from support.toy import ToyRank, checkpoint, shapes

HIDDEN = 64
FULL = Selection.full()
TP = {"down.weight": 1, "norm.weight": -1}
TRAINERS = {  # (shape of the mesh, the placements of a tensor)
    "whole": ((3,), lambda name: (Placement(),)),
    "fsdp": ((3,), lambda name: (Placement(0),)),
    "tp": ((4,), lambda name: (Placement(TP.get(name, 0)),)),
    "hsdp": ((2, 3), lambda name: (Placement(), Placement(0))),
    "fsdp over tp": (
        (2, 2),
        lambda name: (Placement(0, 2 if TP.get(name, 0) == 0 else 1), Placement(TP.get(name, 0))),
    ),
}


def layout_of(kind, dtype=torch.float32):
    mesh, placements = TRAINERS[kind]
    table = sorted({placements(name) for name in shapes(HIDDEN)}, key=str)
    tensors = tuple(
        SourceTensor(name, shape, str(dtype).removeprefix("torch."), 0, table.index(placements(name)))
        for name, shape in shapes(HIDDEN).items()
    )
    ranks = int(np.prod(mesh))
    return SourceLayout(ranks, (Mesh(mesh, tuple(range(ranks))),), tuple(table), tensors)


class Engine:
    """One engine rank with its traced loader, filled as a checkpoint says."""

    def __init__(self, layout, rank, size, dtype):
        self.model = ToyRank(rank, size, dtype, HIDDEN)
        self.program = trace(self.model, [t.spec for t in layout.tensors])
        self.checksums = TargetChecksums(TensorIndex.of(layout), self.program)

    def load(self, weights):
        self.model.load_weights(weights.items())
        return self


class World:
    """Trainer ranks that have version 1 and engine ranks that were filled with it."""

    def __init__(self, kind="fsdp", engines=2, dtype=torch.bfloat16):
        self.layout, self.right = layout_of(kind), checkpoint(1, hidden=HIDDEN)
        self.engines = [Engine(self.layout, e, engines, dtype).load(self.right) for e in range(engines)]
        own = [engine.checksums.regions for engine in self.engines]
        self.shards = [shards(self.layout, self.right, r) for r in range(self.layout.trainer_ranks)]
        self.sources = [SourceChecksums(self.layout, local, r, own) for r, local in enumerate(self.shards)]

    def differing(self, selection=FULL):
        """The names of the tensors that differ on each engine rank; empty if none does."""
        expected = expected_of(self.sources, selection)
        have = [engine.checksums.compute(selection) for engine in self.engines]
        return [
            engine.checksums.tensor_names(np.flatnonzero(mine != right).tolist())
            for engine, mine, right in zip(self.engines, have, expected, strict=True)
        ]

    def load(self, **wrong):
        """Fill the engine ranks with the right weights but for these."""
        given = {name.replace("_", ".") + ".weight": tensor for name, tensor in wrong.items()}
        assert not any(torch.equal(tensor, self.right[name]) for name, tensor in given.items())
        for engine in self.engines:
            engine.load({**self.right, **given})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("engines", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", TRAINERS)
def test_checksums_agree_whatever_the_layouts_and_dtypes(kind, engines, dtype):
    world = World(kind, engines, dtype)
    for selection in (FULL, Selection.sample(0), Selection.sample(77), Selection.sample(3, 5)):
        assert world.differing(selection) == [""] * engines
    for engine in world.engines:
        assert engine.checksums.compute(FULL).any()


def test_padding_is_not_looked_at():
    world = World(engines=4)
    world.engines[-1].model.embed.data[-1] = 7  # 21 rows on 4 ranks of 6
    assert world.differing() == [""] * 4


@pytest.mark.parametrize("kind", ["fsdp", "tp", "hsdp"])
def test_two_shards_that_came_as_each_others_are_noticed(kind):
    world = World(kind)
    for name, dim in {"q.weight": 0, "down.weight": 1 if kind == "tp" else 0}.items():
        first, second, *rest = world.right[name].split(16, dim)
        world.load(**{name.removesuffix(".weight"): torch.cat([second, first, *rest], dim)})
        assert name in world.differing(), name
    world.load()
    assert world.differing() == ["", ""]


@pytest.mark.parametrize("selection", [FULL, *(Selection.sample(n) for n in (0, 1, 63))])
def test_a_stale_tensor_is_noticed_by_any_sample(selection):
    world, old = World(), checkpoint(0, hidden=HIDDEN)
    for name in world.right:
        world.load(**{name.removesuffix(".weight"): old[name]})
        assert world.differing(selection) == [name, name]


def test_exchanged_tensors_of_one_shape_are_noticed_even_in_one_group(monkeypatch):
    monkeypatch.setattr(regions, "MAX_GROUPS", 1)
    world = World()
    assert world.differing() == ["", ""]
    for one, other in (("k", "v"), ("gate", "up")):
        right = world.right[f"{one}.weight"], world.right[f"{other}.weight"]
        world.load(**{one: right[1], other: right[0]})
        names = "embed.weight, q.weight, k.weight, v.weight, gate.weight and 3 more"
        assert world.differing() == [names, names]


def test_a_part_that_is_missing_is_noticed_even_if_all_weights_are_zero():
    world = World("fsdp")
    zeros = world.right["up.weight"].clone()
    zeros[:5] = 0
    world.load(up=zeros)
    assert world.differing() == ["up.weight", ""]
    for local in world.shards:
        for shard in local:
            shard.zero_()
    for engine in world.engines:
        engine.load({name: torch.zeros_like(tensor) for name, tensor in world.right.items()})
    assert world.differing() == ["", ""]
    world.sources = world.sources[1:]
    assert all(names.startswith("embed.weight") for names in world.differing()[:1])


def test_each_place_of_elements_that_are_kept_twice_is_looked_at():
    layout, right = layout_of("fsdp"), checkpoint(1, hidden=HIDDEN)
    number = next(i for i, t in enumerate(layout.tensors) if t.name == "k.weight")
    whole = right["k.weight"]
    copies = [wanted(layout, number, Box.whole(tuple(whole.shape)), offset) for offset in (0, 1000)]
    region = Region((0, 1), (6, 20), (1, 3))
    copies.append(Copy("k.weight", region, "scratch/0", 3, (1, 6)))
    targets = {"live": torch.zeros(1000 + whole.numel()), "scratch/0": torch.zeros(200)}
    for copy in copies:
        copy.destination(targets[copy.target]).copy_(whole[copy.region.slices()])
    target = TargetChecksums(TensorIndex.of(layout), Program(tuple(copies), targets))
    assert [kind.copies for _, kind in target.regions] == [2, 1]
    sources = [SourceChecksums(layout, shards(layout, right, r), r, [target.regions]) for r in range(3)]
    expected = expected_of(sources, FULL)[0]
    assert np.array_equal(target.compute(FULL), expected)
    for name, element in (("live", 10), ("live", 1010), ("scratch/0", 9)):
        right_one = targets[name][element].clone()
        targets[name][element] = 123
        assert np.flatnonzero(target.compute(FULL) != expected).tolist() == [number]
        targets[name][element] = right_one
    assert np.array_equal(target.compute(FULL), expected)


def test_holders_of_the_same_elements_share_the_work():
    world = World("whole", engines=1)
    parts = np.stack([expected_of([source], FULL)[0] for source in world.sources])
    assert ((parts != 0).sum(axis=0) == 1).all(), "each tensor is counted by one trainer rank"
    assert ((parts != 0).sum(axis=1) > 0).all(), "and each trainer rank counts some"


def test_region_sets_are_the_same_in_any_order_and_small_on_the_wire():
    alike = [RegionKind("bfloat16", Region((0, 64 * part), (512, 64), (1, 1))) for part in range(4)]
    given = [(tensor, alike[tensor % 4]) for tensor in range(100_000)]
    made, turned = RegionSet.of(given), RegionSet.of(reversed(given))
    assert made == turned
    assert pack_blob(made)[0] == pack_blob(turned)[0]
    assert list(made) == given
    assert len(made) == 100_000
    assert pack_blob(made)[0] != pack_blob(RegionSet.of(given[1:]))[0]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=RegionSet)
    assert sent == made
    assert len(zlib.compress(msgspec.msgpack.encode(made), 1)) < 400_000


GOOD = RegionSet.of([(0, RegionKind("bfloat16", Region((0, 0), (21, 64), (1, 1))))])
KINDS = [
    RegionKind("bfloat16", Region((0,), (64,), (1,))),
    RegionKind("bfloat16", Region((-1, 0), (2, 64), (1, 1))),
    RegionKind("bfloat16", Region((0, 0), (11, 64), (3, 1))),
    RegionKind("bfloat16", Region((0, 0), (2, 64), (0, 1))),
    RegionKind("bfloat16", Region((6, 0), (1, 64), (1 << 63, 1))),
    RegionKind("bfloat16", Region((0, 0), (0, 64), (1, 1))),
    RegionKind("tensor", Region((0, 0), (21, 64), (1, 1))),
]
TABLES = [{"tensors": b"\x08\0\0\0"}, {"tensors": b"\xff" * 4}, {"kind_of": b"\1\0\0\0"}, {"kind_of": b""}]
TABLES += [{"tensors": b"\0\0\0", "kind_of": b"\0\0\0"}]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *((RegionSet.of([(0, kind)]), r"a checksum of embed\.weight as .*, but it is float32") for kind in KINDS),
        *((msgspec.structs.replace(GOOD, **table), "checksums of tensors") for table in TABLES),
    ],
)
def test_regions_that_the_layout_does_not_have_are_refused_by_name(wrong, says):
    layout = layout_of("fsdp")
    local = shards(layout, checkpoint(1, hidden=HIDDEN), 0)
    with pytest.raises(Mismatch, match=f"engine rank 1 requests {says}"):
        SourceChecksums(layout, local, 0, [GOOD, wrong])


@pytest.mark.parametrize("copies", [0, 1 << 31])
def test_a_number_of_copies_that_no_rank_keeps_is_refused(copies):
    regions = RegionSet.of([(0, RegionKind("bfloat16", Region((0, 0), (21, 64), (1, 1)), copies))])
    with pytest.raises(Mismatch, match=r"`\$.kinds\[0\]\[2\]`"):
        decode(encode(regions), RegionSet)


def test_a_rank_that_keeps_nothing_has_no_checksums():
    layout = layout_of("fsdp")
    local = shards(layout, checkpoint(1, hidden=HIDDEN), 0)
    assert not any(SourceChecksums(layout, local, 0, [RegionSet.of([])]).compute(FULL).rows)
    target = TargetChecksums(TensorIndex.of(layout), Program((), {}))
    assert not target.compute(FULL).any()
    assert target.tensor_names([0, 1]) == ""


# -- one number for a model


def digest(layout, engines, weights, dtype=torch.bfloat16, selection=FULL):
    """Of weights that such trainer ranks have, for an engine of so many ranks."""
    traced = [trace(ToyRank(e, engines, dtype, HIDDEN), [t.spec for t in layout.tensors]) for e in range(engines)]
    kept = [TargetChecksums(TensorIndex.of(layout), program).regions for program in traced]
    local = [shards(layout, weights, rank) for rank in range(layout.trainer_ranks)]
    parts = [SourceChecksums(layout, own, rank, kept).compute(selection).model for rank, own in enumerate(local)]
    return whole_model.model_digest(parts)


def test_the_digest_depends_on_no_layout_and_no_size():
    weights = checkpoint(1, hidden=HIDDEN)
    layouts = [layout_of(kind) for kind in TRAINERS]
    layouts.append(msgspec.structs.replace(layouts[1], tensors=layouts[1].tensors[::-1]))
    (found,) = {digest(layout, engines, weights) for layout in layouts for engines in (1, 2, 4, 8)}
    assert len(found) == 16
    assert digest(layouts[0], 2, weights, selection=Selection.sample(1)) == "", "a sample has none"


def test_any_other_weights_have_another_digest():
    layout, weights = layout_of("fsdp"), checkpoint(1, hidden=HIDDEN)
    seen = {digest(layout, 2, weights, dtype) for dtype in (torch.float32, torch.bfloat16)}
    for name in weights:
        flipped = weights[name].clone()
        flipped.view(-1).view(torch.int32)[3] ^= 1 << 9
        seen.add(digest(layout, 2, {**weights, name: flipped}, torch.float32))
    exchanged = {**weights, "gate.weight": weights["up.weight"], "up.weight": weights["gate.weight"]}
    seen.add(digest(layout, 2, exchanged, torch.float32))
    assert len(seen) == 3 + len(weights)


@pytest.mark.parametrize(
    ("regions", "counted"),
    [
        ([(0, 8)], True),
        ([(0, 4), (4, 8)], True),
        ([(0, 5), (4, 8)], False),
        ([(0, 4)], False),
    ],
    ids=["whole", "cut", "overlapping", "in part"],
)
def test_elements_that_are_not_counted_once_have_no_digest(regions, counted):
    layout = layout_of("whole")
    number = next(i for i, t in enumerate(layout.tensors) if len(t.shape) == 2)
    rows, columns = layout.tensors[number].shape
    cuts = [(a * rows // 8, b * rows // 8) for a, b in regions]  # given in eighths
    views = [("bfloat16", Region((a, 0), (b - a, columns), (1, 1))) for a, b in cuts]
    found = whole_model.region_coefficients(
        TensorIndex.of(layout), np.full(len(views), number), np.arange(len(views)), views
    )
    assert (found is not None) == counted


def test_a_part_that_is_missing_makes_no_digest():
    assert whole_model.model_digest([1, (1 << 64) - 1]) == "0" * 16
    assert whole_model.model_digest([1, None]) == ""


def test_a_version_and_a_name_are_told_apart():
    """Both are text of users, and together they read the same."""
    found = [whole_model.with_versions("0" * 16, kept) for kept in ({"b of c": "a"}, {"c": "a of b"})]
    assert found[0] != found[1]
