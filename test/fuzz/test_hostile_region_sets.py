"""Whatever regions an engine rank sends: they are refused, or it gets the checksums of just those."""

from fuzz.arbitrary import changed, value_of
from fuzz.settings import fuzzed
from fuzz.states import shards_of
from sglang_reshard.errors import Mismatch
from sglang_reshard.landings.checked.regions import RegionKind, RegionSet, Selection, num_groups
from sglang_reshard.landings.checked.source import SourceChecksums
from sglang_reshard.layout.decoders import pack_blob, unpack_blob
from support.drawn import copies_of, layout_of
from support.plans import values

LIVE = ("float32", "bfloat16")


def regions_of(layout, random):
    numbers = {tensor.name: number for number, tensor in enumerate(layout.tensors)}
    dtype = random.choice(LIVE)
    regions = {(numbers[copy.source], copy.region) for copy in copies_of(layout, random)}
    return RegionSet.of((number, RegionKind(dtype, region)) for number, region in sorted(regions, key=str))


@fuzzed
def test_changed_region_sets_are_refused_or_answered(random):
    layout = layout_of(random)
    rank = random.randrange(layout.trainer_ranks)
    shards = shards_of(layout, values(layout, random.getrandbits(32)), rank, random)
    regions = value_of(RegionSet, random) if random.random() < 0.2 else regions_of(layout, random)
    for _ in range(random.choice((0, 1, 1, 2))):
        regions = changed(regions, random)
    try:
        digest, blob = pack_blob(regions)
        regions = unpack_blob(blob, RegionSet, digest)
        source = SourceChecksums(layout, shards, rank, [regions])
    except Mismatch:
        return
    selection = random.choice((Selection.full(), Selection.sample(random.randrange(100)), value_of(Selection, random)))
    assert len(source.compute(selection).rows) == 8 * num_groups(len(layout.tensors))
