"""The algebra of checksums: they are what the definition says, however elements are split, strided and chunked."""

import itertools
import math
import tracemalloc

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sglang_reshard.landings.checked import checksum, coefficients
from sglang_reshard.landings.checked import regions as selection
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.landings.checked.source import SourceChecksums
from sglang_reshard.landings.checked.target import TargetChecksums
from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.plan import TensorIndex
from sglang_reshard.trace.program import Program
from support.largest import LargestResult
from support.plans import copies_of, expected_of, loaded, meshed_layouts, shards, values
from support.sweep import examples

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32,
    torch.int32, torch.int64, torch.float64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
MASK = (1 << 64) - 1


def odd(number, salt):
    """splitmix64, written out once more."""
    x = ((number + 1) * 0x9E3779B97F4A7C15 + salt) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return (x ^ (x >> 31)) | 1


def by_definition(whole, region):
    """Element by element, in Python's integers."""
    shape = tuple(whole.shape) or (1,)
    whole = whole.reshape(shape)
    size = whole.element_size()
    pattern = whole.contiguous().view(torch.uint8).numpy().tobytes()
    found = 0
    axes = (range(a, a + n * s, s) for a, n, s in zip(region.start, region.count, region.step, strict=True))
    for index in itertools.product(*(axes if region.start else [range(1)])):
        row, column = 0, index[-1]
        for i, n in zip(index[:-1], shape[:-1], strict=True):
            row = row * n + i
        begin = (row * shape[-1] + column) * size
        for half in range(0, size, 4):
            part = pattern[begin + half : begin + min(size, half + 4)]
            word, byte = divmod(column * size + half, 4)
            weight = odd(row, coefficients._ROWS) * odd(word, coefficients._COLUMNS) << 8 * byte
            found += weight * (int.from_bytes(part, "little") + 1)
    return found & MASK


def random_bytes(shape, dtype, seed=0):
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    if dtype == torch.bool:
        raw = raw % 2
    return raw.to(torch.uint8).view(dtype).reshape(shape)


def whole_region(shape):
    return Region.of(Box.whole(tuple(shape)))


def checksum_of(view, shape, region, dtype=None, how=None):
    """Of a view that holds the region."""
    batch = RegionBatch()
    batch.add(RegionSpec.of(tuple(shape), region, dtype or view.dtype, dtype not in (None, view.dtype)), view, 0)
    return int(batch.checksums(1, how or Selection.full())[0])


@st.composite
def regions(draw, shape):
    start, count, step = [], [], []
    for length in shape:
        step.append(draw(st.integers(1, 3)))
        start.append(draw(st.integers(0, length - 1)))
        count.append(draw(st.integers(1, (length - 1 - start[-1]) // step[-1] + 1)))
    return Region(tuple(start), tuple(count), tuple(step))


@st.composite
def strided(draw, tensor):
    """The same elements, in memory that is transposed, has gaps and begins anywhere."""
    order = draw(st.permutations(range(tensor.dim())))
    gaps = [draw(st.integers(1, 2)) for _ in order]
    offset = draw(st.integers(0, 3))
    strides, stride = [0] * tensor.dim(), draw(st.integers(1, 2))
    for d, gap in zip(order, gaps, strict=True):
        strides[d], stride = stride, stride * tensor.shape[d] * gap
    memory = torch.zeros(offset + stride + 1, dtype=torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype)
    view = memory.view(tensor.dtype).as_strided(tensor.shape, strides, offset)
    return view.copy_(tensor)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_it_is_the_definition_for_any_dtype_region_stride_and_chunk(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    whole = random_bytes(shape, dtype)
    region = data.draw(regions(shape))
    view = data.draw(strided(whole[region.slices()]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "CHUNK", data.draw(st.sampled_from([1, 5, 8, 64, 1 << 18])))
        assert checksum_of(view, shape, region) == by_definition(whole, region)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_like_views_together_are_each_by_itself(data):
    """Thousands of small tensors are stacked: none takes anything from its neighbours."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    views = [random_bytes(shape, dtype, seed) for seed in range(5)]
    batch = RegionBatch()
    for row, view in enumerate(views):
        batch.add(RegionSpec.of(shape, whole_region(shape), dtype, False), view, row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "CHUNK", data.draw(st.sampled_from([1, 20, 1 << 18])))
        found = batch.checksums(5, Selection.full())
    assert found.tolist() == [by_definition(view, whole_region(shape)) for view in views]


def test_rows_and_columns_beyond_the_tables_are_weighed_alike(monkeypatch):
    tall, wide = random_bytes((70, 2), torch.bfloat16), random_bytes((2, 70), torch.bfloat16)
    deep = random_bytes((3, 30, 2), torch.float32)
    expected = [by_definition(t, whole_region(t.shape)) for t in (tall, wide, deep)]
    assert [checksum_of(t, t.shape, whole_region(t.shape)) for t in (tall, wide, deep)] == expected
    monkeypatch.setattr(coefficients, "_TABLE_SIZE", 16)
    assert [checksum_of(t, t.shape, whole_region(t.shape)) for t in (tall, wide, deep)] == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 8), (5, 7), (2, 3, 4), (9,)])
def test_other_devices_calculate_as_a_cpu_does(dtype, shape):
    """With torch's operations in place of numpy's, on the CPU."""
    views = [random_bytes(shape, dtype, seed) for seed in range(2)]
    columns = coefficients.column_coefficients(0, shape[-1], 1, dtype.itemsize)
    rows = coefficients.row_coefficients(shape, whole_region(shape))
    read = checksum.units([checksum.readable(v, False) for v in views], dtype, False, columns.packed)
    on_cpu, on_device = (
        summed(read, rows, columns.values) for summed in (checksum._sum_on_cpu, checksum._sum_on_device)
    )
    assert on_cpu.dtype == on_device.dtype == torch.int64
    assert on_cpu.tolist() == on_device.tolist()


@settings(max_examples=examples(100), deadline=None)
@given(layout=meshed_layouts(), data=st.data())
def test_trainer_ranks_of_any_layout_add_up_to_any_engine_ranks_checksums(layout, data):
    copies = [data.draw(copies_of(layout)) for _ in range(2)]
    assume(any(copies))
    one_in = data.draw(st.integers(1, 5))
    how = Selection.sample(data.draw(st.integers(0, 7)), one_in)
    whole, catalog = values(layout), TensorIndex.of(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "WHOLE_ELEMENTS", 5)
        targets = [TargetChecksums(catalog, Program(tuple(c), loaded(c, whole))) for c in copies]
        kept = [target.regions for target in targets]
        sources = [SourceChecksums(layout, shards(layout, whole, r), r, kept) for r in range(layout.trainer_ranks)]
        expected = expected_of(sources, how)
        assert expected.tolist() == [target.compute(how).tolist() for target in targets]


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_updates_that_follow_each_other_select_every_element_once(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    region, one_in = data.draw(regions(shape)), data.draw(st.integers(1, 6))
    whole = torch.arange(math.prod(shape)).view(shape)
    seen, everyone = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "WHOLE_ELEMENTS", 0)
        for number in range(one_in):
            how = Selection.sample(number, one_in)
            everyone += whole[how.narrow(shape, whole_region(shape))[0].slices()].flatten().tolist()
            if narrowed := how.narrow(shape, region):
                selected, slices = narrowed
                within = whole[region.slices()][slices]
                assert torch.equal(within, whole[selected.slices()])
                seen += within.flatten().tolist()
    wanted = whole[region.slices()].flatten().tolist()
    if max(shape) >= one_in:
        assert sorted(seen) == sorted(wanted)
        assert sorted(everyone) == whole.flatten().tolist()
    assert set(seen) == set(wanted), "short dimensions come again sooner, and are seen all the same"


def test_a_sample_is_of_whole_rows_and_leaves_no_tensor_out():
    how = Selection.sample(70, 64)
    whole = how.narrow((4096,), whole_region((4096,)))[0]
    assert whole == whole_region((4096,)), "small tensors are looked at whole"
    assert how.narrow((1 << 20,), whole_region((1 << 20,)))[0] == Region((6,), (1 << 14,), (64,))
    matrix = how.narrow((640, 9000), whole_region((640, 9000)))[0]
    assert matrix == Region((6, 0), (10, 9000), (64, 1))
    experts = how.narrow((16, 128, 64), whole_region((16, 128, 64)))[0]
    assert experts == Region((0, 6, 0), (16, 2, 64), (1, 64, 1))
    two_rows = how.narrow((2, 9000), whole_region((2, 9000)))[0]
    assert two_rows.count == (2, 141)
    cube = how.narrow((20, 20, 20), whole_region((20, 20, 20)))[0]
    assert cube == Region((10, 0, 0), (1, 20, 20), (20, 1, 1))
    with pytest.raises(ValueError, match="at least 1"):
        Selection.sample(0, 0)
    with pytest.raises(msgspec.ValidationError, match="at least 1"):
        msgspec.msgpack.decode(msgspec.msgpack.encode([3, -1]), type=Selection)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_of_any_element_is_noticed(dtype):
    shape = (3, 5)
    whole = random_bytes(shape, dtype)
    before = checksum_of(whole, shape, whole_region(shape))
    raw = whole.view(torch.uint8)
    for byte in itertools.product(range(3), range(raw.shape[1])):
        for bit in range(1 if dtype == torch.bool else 8):
            raw[byte] ^= 1 << bit
            assert checksum_of(whole, shape, whole_region(shape)) != before, (byte, bit)
            raw[byte] ^= 1 << bit
    assert checksum_of(whole, shape, whole_region(shape)) == before


def test_a_cast_is_the_copys_and_all_nans_are_one():
    whole = random_bytes((33, 41), torch.float32)  # whatever patterns there are
    whole[3, 7:30] = torch.tensor([float("nan"), -float("nan"), float("inf")]).repeat(8)[:23]
    whole.view(torch.int32)[5, 3:20] = 0x7F800001 + torch.arange(17, dtype=torch.int32)  # becomes infinity if cut off
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        kept = torch.empty(whole.shape, dtype=dtype).copy_(whole)
        region = whole_region(whole.shape)
        batch = RegionBatch()
        batch.add(RegionSpec.of((33, 41), region, dtype, True), kept, 0)
        for rows, columns in itertools.product([(0, 3), (3, 33)], [(0, 17), (17, 18), (18, 41)]):
            part = Region.of(Box((rows[0], columns[0]), (rows[1], columns[1])))
            batch.add(RegionSpec.of((33, 41), part, dtype, True), whole[part.slices()], 1)
        engine, trainer = batch.checksums(2, Selection.full()).tolist()
        assert engine == trainer
        kept[32, 40] = 1.25
        assert batch.checksums(2, Selection.full())[0] != trainer


@pytest.mark.parametrize("how", [Selection.full(), Selection.sample(1, 4)])
def test_temporaries_stay_small_whatever_the_tensors(monkeypatch, how):
    chunk = 1 << 12
    monkeypatch.setattr(checksum, "CHUNK", chunk)
    n = 64 * chunk
    batch = RegionBatch()
    views = {
        "contiguous": (torch.zeros(n // 64, 64, dtype=torch.bfloat16), torch.bfloat16),
        "vector": (torch.zeros(n + 1, dtype=torch.bfloat16), torch.bfloat16),
        "transposed": (torch.zeros(64, n // 64).t(), torch.float32),
        "cast": (torch.zeros(n // 64, 64), torch.bfloat16),
        "cast to NaN": (torch.full((n // 64, 64), math.nan), torch.bfloat16),
        "double": (torch.zeros(n // 64, 64, dtype=torch.float64), torch.float64),
        "eight bits": (torch.zeros(63, n // 63, dtype=torch.float8_e4m3fn), torch.float8_e4m3fn),
    }
    for row, (view, dtype) in enumerate(views.values()):
        batch.add(RegionSpec.of(tuple(view.shape), whole_region(view.shape), dtype, dtype != view.dtype), view, row)
    for row in range(1000):
        small = torch.zeros(64)
        batch.add(RegionSpec.of((64,), whole_region((64,)), torch.bfloat16, True), small, len(views) + row)
    with LargestResult() as largest:  # this also makes the tables of weights, which stay
        batch.checksums(1007, how)
    tracemalloc.start()
    try:
        batch.checksums(1007, how)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < largest.nbytes <= 8 * chunk
    assert 0 < peak <= 56 * chunk  # numpy's: chunks as 64-bit integers, and the numbers of their rows
    assert 56 * chunk < min(view.numel() * view.element_size() for view, _ in views.values())


def test_nothing_is_nothing():
    assert RegionBatch().checksums(3, Selection.full()).tolist() == [0, 0, 0]
    batch = RegionBatch()
    batch.add(RegionSpec.of((0, 3), whole_region((0, 3)), torch.float32, False), torch.empty(0, 3), 0)
    assert batch.checksums(1, Selection.full()).tolist() == [0]
    assert np.array_equal(batch.checksums(1, Selection.sample(5)), np.zeros(1, np.uint64))
