"""Coverage is refused exactly where an element of a parameter is not written, or any element twice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.errors import Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.gaps import check_coverage
from sglang_reshard.trace.geometry import Geometry, IndexMap
from sglang_reshard.trace.lazy_tensor import CheckpointTensor, Record
from sglang_reshard.trace.live import live_storages
from sglang_reshard.trace.loader import Loader
from sglang_reshard.trace.program import MayStay
from sglang_reshard.trace.stock_load import StockLoad
from support.sweep import examples

COLUMNS = 4


@st.composite
def tilings(draw):
    """Runs and blocks of columns of a storage of rows, most of them next to each other: (first element, geometry)."""
    rows = draw(st.integers(1, 6))
    found, row = [], 0
    while row < rows:
        count = draw(st.integers(1, rows - row))
        split = draw(st.sampled_from([0, 0, 0, 1, 3]))
        columns = [(0, split), (split, COLUMNS - split)] if split else [(0, COLUMNS)]
        found += [Geometry(row * COLUMNS + at, (count, width), (COLUMNS, 1)) for at, width in columns]
        row += count
    spoiled = draw(st.sampled_from(["", "", "missing", "twice"]))
    if spoiled:
        number = draw(st.integers(0, len(found) - 1))
        found = (
            found[:number]
            + found[number + (spoiled == "missing") :]
            + found[number : number + 1] * (spoiled == "twice")
        )
    return rows, draw(st.permutations(found))


@given(tilings(), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_every_element_of_a_parameter_is_written_once(tiling, gap):
    rows, writes = tiling
    flat = torch.zeros(rows * COLUMNS)
    model = torch.nn.Module()
    cut = rows // 2 * COLUMNS
    # With a gap, the first element belongs to no parameter.
    for name, part in (("a", flat[gap:cut]), ("b", flat[max(cut, gap) :])):
        model.register_parameter(name, torch.nn.Parameter(part, requires_grad=False))
    model.flat = flat
    storages = live_storages(model)
    (storage,) = storages.values()
    source = CheckpointTensor(TensorSpec("w", (rows, COLUMNS), "float32"))
    records = [Record(storage, torch.float32, IndexMap.flattening(geometry).inverted(), source) for geometry in writes]
    counts = torch.zeros(rows * COLUMNS)
    for geometry in writes:
        counts.as_strided(geometry.size, geometry.stride, geometry.offset).add_(1)
    stock = StockLoad(Loader(model), (), records, None, MayStay())
    if bool((counts[int(gap) :] == 0).any()) or bool((counts > 1).any()):
        with pytest.raises(Unsupported, match=r"not written|more than once"):
            check_coverage(storages, records, stock)
    else:
        check_coverage(storages, records, stock)
