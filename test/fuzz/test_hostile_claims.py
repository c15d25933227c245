"""Whatever an engine rank claims to keep: it is refused, or it gets the digests of just that."""

import numpy as np

from fuzz.arbitrary import changed, value_of
from fuzz.settings import fuzzed
from fuzz.states import copies_of, layout_of, shards_of, whole_of
from sglang_reshard.digest.regions import RegionCount, RegionKind, RegionSet, groups_of
from sglang_reshard.digest.selection import Selection
from sglang_reshard.digest.source import SourceChecksums
from sglang_reshard.errors import Mismatch
from sglang_reshard.layout.manifest import pack_blob, unpack_blob

LIVE = ("float32", "bfloat16")


def claims_of(layout, random):
    numbers = {tensor.name: number for number, tensor in enumerate(layout.tensors)}
    dtype = random.choice(LIVE)
    regions = {(numbers[copy.source], copy.region) for copy in copies_of(layout, random)}
    return RegionSet.of(
        RegionCount(number, RegionKind(dtype, r.start, r.count, r.step)) for number, r in sorted(regions, key=str)
    )


@fuzzed
def test_changed_claims_are_refused_or_vouched_for(random):
    layout = layout_of(random)
    rank = random.randrange(layout.trainer_ranks)
    shards = shards_of(layout, whole_of(layout, random), rank, random)
    claims = value_of(RegionSet, random) if random.random() < 0.2 else claims_of(layout, random)
    for _ in range(random.choice((0, 1, 1, 2))):
        claims = changed(claims, random)
    try:
        digest, blob = pack_blob(claims)
        claims = unpack_blob(blob, RegionSet, digest)
        voucher = SourceChecksums(layout, shards, rank, [claims])
    except Mismatch:
        return
    selection = random.choice((Selection.full(), Selection.sample(random.randrange(100)), value_of(Selection, random)))
    digests = voucher.digests(selection)
    assert digests.dtype == np.uint64
    assert digests.shape == (1, groups_of(len(layout.tensors)))
