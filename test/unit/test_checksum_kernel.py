"""A GPU's checksums are a CPU's, however the memory is laid out.

Triton's interpreter runs the kernel on host memory; that it compiles for GPUs, and with the widest loads, is seen in
its PTX.
"""

import itertools
import logging
import re
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.landings.checked import checksum, kernel_sums
from sglang_reshard.landings.checked import regions as selection
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.regions import Selection
from support import copy_tables
from support.copy_tables import InterpretedGpu, interpreted
from support.sweep import examples, only
from unit.test_digest import DTYPES, checksum_of, random_bytes, regions, strided, whole_region

pytest.importorskip("triton")


@contextmanager
def kernel_alone():
    """Checksums are the kernel's inside the block: torch has no part in them. A program has two tiles, to be fast."""
    torch_was_asked = mock.patch.object(checksum, "_chunks", side_effect=AssertionError("torch was asked"))
    with interpreted(), torch_was_asked, mock.patch.object(kernel_sums, "_STEPS", 2):
        yield


def filled(views, spec):
    batch = RegionBatch()
    for row, view in enumerate(views):
        batch.add(spec, view, row)
    return batch


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_the_kernel_sums_what_a_cpu_sums(data):
    """Torch sums what the kernel cannot read: as on a CPU, for the tensors are one's."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 9, 16, 70]), max_size=3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    region = data.draw(regions(shape))
    view = data.draw(strided(random_bytes(shape, dtype)[region.slices()]))
    expected = checksum_of(view, shape, region)
    with interpreted(), mock.patch.object(kernel_sums, "_STEPS", 2):
        assert checksum_of(view, shape, region) == expected


@pytest.mark.parametrize("dtype", only(DTYPES, [torch.uint8, torch.bfloat16, torch.float32, torch.int64].__contains__))
def test_it_reads_all_views_of_a_model(dtype):
    """Rows of more than a program's, columns of more than a tile's, stacked experts, odd rows, and samples of them."""
    for shape, part in (
        ((75, 20), (slice(None), slice(None))),
        ((1100, 12), (slice(3, 1090), slice(4, 12))),
        ((70, 1200), (slice(1, None), slice(8, 1160))),
        ((3, 40, 24), (slice(1, None), slice(0, 40, 2), slice(None))),
        ((9, 2200), (slice(None, None, 2), slice(None))),
        ((2500,), (slice(4, None),)),
    ):
        wholes = [random_bytes(shape, dtype, seed) for seed in range(2)]
        region = whole_region(wholes[0][part].shape)
        batch = filled([whole[part] for whole in wholes], RegionSpec.of(tuple(region.count), region, dtype, False))
        strides = 1 if len(shape) == 1 and dtype.itemsize == 8 else 4  # halves of strided elements are left to torch
        for how in (Selection.full(), Selection.sample(1, strides)):
            with mock.patch.object(selection, "WHOLE_ELEMENTS", 5):
                expected = batch.checksums(2, how).tolist()
                with kernel_alone():
                    assert batch.checksums(2, how).tolist() == expected


CAST = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("source", "target"), list(itertools.product(CAST, CAST)))
def test_a_cast_is_the_copys_and_all_nans_are_one(source, target):
    """Also where the engine has the target's dtype already: there its NaNs are made one."""
    whole = random_bytes((70, 44), source)  # whatever patterns there are
    whole[3, 7:30] = torch.tensor([float("nan"), -float("nan"), float("inf")], dtype=source).repeat(8)[:23]
    if source == torch.float32:
        whole.view(torch.int32)[5, 3:20] = 0x7F800001 + torch.arange(17, dtype=torch.int32)  # NaN, infinity if cut off
    for view in (whole, whole[1:, 4:24], whole[:, 1:14], whole.t()):
        shape = tuple(view.shape)
        batch = filled([view, view.to(target)], RegionSpec.of(shape, whole_region(shape), target, True))
        expected = batch.checksums(2, Selection.full()).tolist()
        assert expected[0] == expected[1]
        with kernel_alone():
            assert batch.checksums(2, Selection.full()).tolist() == expected


@pytest.mark.parametrize("why", ["it is out of reach", "another cast", "rows in three dimensions", "split words"])
def test_torch_sums_what_the_kernel_cannot_read(why):
    whole, dtype, gpu = random_bytes((4, 6, 5, 8), torch.float64), torch.float64, InterpretedGpu()
    view = whole[0]
    if why == "it is out of reach":
        gpu = InterpretedGpu(lambda tensor: False)
    elif why == "another cast":
        dtype = torch.bfloat16
    elif why == "rows in three dimensions":
        view = whole[:3, :5, :4]
    else:
        view = whole[0, 0].t()
    expected = checksum_of(view, view.shape, whole_region(view.shape), dtype)
    with interpreted(gpu):
        assert checksum_of(view, view.shape, whole_region(view.shape), dtype) == expected
    assert not gpu.kernels


def test_a_host_without_a_compiler_sums_by_torch_and_says_so_once(caplog):
    whole = random_bytes((9, 8), torch.bfloat16)
    expected = checksum_of(whole, whole.shape, whole_region(whole.shape))
    failing = mock.patch.object(
        copy_tables.interpreted_kernel("sglang_reshard.landings.checked.checksum_kernel"),
        "launch",
        side_effect=OSError("no cc"),
    )
    with interpreted(), failing, caplog.at_level(logging.WARNING):
        assert [checksum_of(whole, whole.shape, whole_region(whole.shape)) for _ in range(2)] == [expected] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "torch computes checksums on cpu, which is slow: Triton cannot be used: no cc"
    ]


@pytest.mark.parametrize(
    ("dtypes", "nan", "per_word", "unit"),
    [
        (("uint32", "uint32"), 0, 1, 4),
        (("float32", "bfloat16"), 0x7FC0, 2, 4),
        (("bfloat16", "bfloat16"), 0x7FC0, 2, 2),
    ],
)
def test_a_thread_of_a_gpu_reads_16_bytes_at_a_time(dtypes, nan, per_word, unit):
    """All but the table, which is read by 64 bits."""
    ptx = copy_tables.checksum_ptx_of(90, *dtypes, nan, per_word, True, 16 // unit, 4, 512, 16, 7)
    loads = Counter(re.findall(r"ld\.global\S*", ptx))
    assert loads.pop("ld.global.b64")
    assert loads == {"ld.global.v4.b32": 4 * 512 // 128 * unit // 16}  # of 4 rows and 512 columns, by 128 threads
