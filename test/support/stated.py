"""Layouts of two trainer ranks for the tests of manifests: a common one, and one whose holdings are stated."""

from sglang_reshard.layout.regions import Box
from sglang_reshard.layout.source_layout import EXPLICIT
from sglang_reshard.sources import ShardBox, ShardMap, SourceLayout, SourceTensor
from support.plans import tensor_parallel

BIG = 1 << 62
GOOD = tensor_parallel(2, [(4, 3), (4, 3), (5,)], [0, 0, -1])


def stated(held):
    return SourceLayout(2, (), (), (SourceTensor("w", (4, 2), "float32", EXPLICIT, 0),), (held,))


def rows(*held):
    return ShardMap(tuple(ShardBox(Box((a, 0), (b, 2)), ranks, (at, 0)) for a, b, ranks, at in held))
