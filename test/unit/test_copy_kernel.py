"""A list of copies on a GPU is a few launches, which do what torch's `copy_` does, bit for bit.

The tables are run in numpy, and the kernel by Triton's interpreter on host memory; that it compiles for GPUs, and with
the widest loads, is seen in its PTX.
"""

import logging
import os
import subprocess
import sys
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.test_random_plans import test_every_element_lands_and_nothing_else_is_written as lands
from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.copying.copy_table import CASTS, DEFAULT_TILING, launches_of
from support import copy_tables
from support.copy_tables import InterpretedGpu, interpreted, run_in_numpy
from support.sweep import SWEEP, sweep

pytest.importorskip("triton")

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8]
DTYPES += [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int16, torch.complex128]
EXAMPLES = 200 if SWEEP else 12


def filled(nbytes):
    """Memory with any bytes, but for those of a NaN."""
    return torch.randint(0, 100, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


# -- views of any strides


@st.composite
def strides_of(draw, size, may_repeat):
    """Strides of a tensor of this size without overlap, in any order of dimensions, with gaps; 0 where it repeats."""
    strides, end = [0] * len(size), draw(st.sampled_from([1, 1, 1, 2, 3]))
    for d in draw(st.permutations(range(len(size)))):
        if may_repeat and draw(st.integers(0, 9)) == 0:
            continue
        strides[d] = end
        end = end * size[d] + draw(st.sampled_from([0, 0, 0, 1, 4, 8]))
    return tuple(strides), end


@st.composite
def pairs_of_views(draw):
    """Memory, and disjoint views of it in pairs: (destination, source)."""
    chosen = []
    for _ in range(draw(st.integers(1, 4))):
        size = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 16]), max_size=4)))
        if draw(st.integers(0, 4)) == 0:
            size = (draw(st.sampled_from([0, 700, 4096, 5000])), *size[:1])
        source = draw(st.sampled_from(DTYPES))
        casts = source in CASTS and draw(st.booleans())
        destination = draw(st.sampled_from(CASTS)) if casts else source
        chosen.append((size, destination, *draw(strides_of(size, False)), draw(st.sampled_from([0, 1, 3, 8]))))
        chosen.append((size, source, *draw(strides_of(size, True)), draw(st.sampled_from([0, 1, 3, 8]))))
    views, end = [], 0
    for size, dtype, strides, extent, start in chosen:
        begin = -(-end // 16) * 16 + start * dtype.itemsize
        views.append((size, dtype, strides, begin))
        end = begin + extent * dtype.itemsize + 32
    memory = filled(end)
    tensors = [memory[begin:].view(-1)[: _floor(end - begin, d)].view(d).as_strided(n, s) for n, d, s, begin in views]
    return memory, list(zip(tensors[::2], tensors[1::2], strict=True))


def _floor(nbytes, dtype):
    return nbytes // dtype.itemsize * dtype.itemsize


def copied_by_torch(memory, pairs):
    """What the memory is after `copy_`; it is left as it was."""
    before = memory.clone()
    for destination, source in pairs:
        destination.copy_(source)
    after = memory.clone()
    memory.copy_(before)
    return after


def launched(pairs):
    launches, rest = launches_of(pairs)
    assert not rest
    return launches


SMALL = DEFAULT_TILING._replace(nbytes=512, strided_columns=16, run=2, max_rows=7)


@pytest.mark.parametrize("tiling", [DEFAULT_TILING, SMALL])
@given(drawn=pairs_of_views())
@settings(max_examples=3 * EXAMPLES, deadline=None)
def test_tables_say_what_torch_copies(tiling, drawn):
    memory, pairs = drawn
    expected = copied_by_torch(memory, pairs)
    launches, rest = launches_of(pairs, tiling)
    assert not rest
    for launch in launches:
        assert (launch.boxes[:, 4] <= tiling.max_rows).all()
        run_in_numpy(launch, memory)
    assert torch.equal(memory, expected)


def run_interpreted(pairs, gpu=None):
    with interpreted(gpu):
        copies = CopyList()
        for pair in pairs:
            copies.add(*pair)
        copies.build()
        copies.run()
    return copies


@given(pairs_of_views())
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_kernel_copies_what_torch_copies(drawn):
    memory, pairs = drawn
    expected = copied_by_torch(memory, pairs)
    copies = run_interpreted(pairs)
    assert not copies._groups
    assert torch.equal(memory, expected)


# -- rows that are not aligned alike, and transposed ones


GAPS = st.sampled_from([0, 0, 1, 2, 3, 5, 7, 8, 16])
SIDES = st.sampled_from([16, 17, 24, 32, 61, 64, 65, 100, 128])


@st.composite
def shifted_pairs(draw):
    """Memory, and a pair of matrices of bytes in it, with rows of any lengths at any addresses."""
    rows, length = draw(st.integers(1, 9)), draw(st.sampled_from([256, 257, 263, 264, 511, 520, 1031, 4100, 9001]))
    gaps, begins = draw(st.tuples(GAPS, GAPS)), draw(st.tuples(*[st.integers(0, 31)] * 2))
    to_row, from_row = (length + gap for gap in gaps)
    memory = filled(64 + rows * (to_row + from_row))
    to, of = memory[begins[0] :], memory[32 + rows * to_row + begins[1] :]
    dtype = draw(st.sampled_from([torch.uint8, torch.float8_e4m3fn]))
    return memory, (
        to.as_strided((rows, length), (to_row, 1)).view(dtype),
        of.as_strided((rows, length), (from_row, 1)).view(dtype),
    )


@st.composite
def transposed_pairs(draw):
    """Memory, and a pair of batches of matrices, of which one is transposed, with gaps between all their rows."""
    batch, rows, columns = draw(st.integers(1, 3)), draw(SIDES), draw(SIDES)
    source = draw(st.sampled_from([*CASTS, torch.uint8, torch.int64]))
    destination = draw(st.sampled_from(CASTS)) if source in CASTS else source
    to_row, from_column = columns + draw(GAPS), rows + draw(GAPS)
    to_matrix, from_matrix = rows * to_row + draw(GAPS), columns * from_column + draw(GAPS)
    begins = [n * dtype.itemsize for n, dtype in zip(draw(st.tuples(GAPS, GAPS)), (destination, source), strict=True)]
    to_bytes, from_bytes = batch * to_matrix * destination.itemsize, batch * from_matrix * source.itemsize
    second = -(-(begins[0] + to_bytes) // 16) * 16 + 256 + begins[1]
    memory = filled(second + from_bytes)
    to = memory[begins[0] : begins[0] + to_bytes].view(destination)
    of = memory[second : second + from_bytes].view(source)
    size = batch, rows, columns
    return memory, (
        to.as_strided(size, (to_matrix, to_row, 1)),
        of.as_strided(size, (from_matrix, 1, from_column)),
    )


@pytest.mark.parametrize(("pairs", "ways"), [(shifted_pairs(), "shifted"), (transposed_pairs(), "transposed")])
def test_what_is_shifted_or_transposed_is_what_torch_copies(pairs, ways):
    seen = set()

    @given(pairs)
    @settings(max_examples=2 * EXAMPLES, deadline=None)
    def run(drawn):
        memory, pair = drawn
        expected = copied_by_torch(memory, [pair])
        before = memory.clone()
        for launch in launched([pair]):
            seen.add(launch.kind.way)
            run_in_numpy(launch, memory)
        assert torch.equal(memory, expected)
        memory.copy_(before)
        run_interpreted([pair])
        assert torch.equal(memory, expected)

    run()
    assert ways in seen


# -- casts


def bits_of(values):
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def patterns(dtype):
    """All values of 16 bits. Of others the edges of what each narrower dtype can hold, and any."""
    if dtype.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    edges = [0.0, -0.0, float("inf"), float("-inf"), float("nan")]
    for narrow in CASTS:
        limits = torch.finfo(narrow)
        for edge in (limits.max, limits.tiny, limits.smallest_normal * limits.eps, 1.0, 1.0 + limits.eps, 3e-45):
            edges += [edge, edge * (1 + limits.eps / 2), edge * (1 + limits.eps / 4), edge / 2, edge * 1.5, edge * 0.75]
    known = torch.tensor(edges + [-e for e in edges], dtype=torch.float64).to(dtype)
    integers = bits_of(known)
    near = torch.cat([integers + n for n in (-1, 0, 1, 1 << 15, 1 << 16)])
    generator = torch.Generator().manual_seed(3)
    low, high = torch.iinfo(integers.dtype).min, torch.iinfo(integers.dtype).max
    anything = torch.randint(low, high, (60_000,), generator=generator, dtype=integers.dtype)
    scaled = torch.randn(30_000, generator=generator, dtype=torch.float64) * torch.logspace(-48, 39, 30_000)
    return torch.cat([near.view(dtype), anything.view(dtype), scaled.to(dtype)])


@pytest.mark.parametrize("source", CASTS)
def test_casts_round_as_torch_does_and_nan_stays_nan(source):
    values = patterns(source)
    others = [dtype for dtype in CASTS if dtype != source]
    found = [torch.zeros_like(values, dtype=dtype) for dtype in others]
    copies = run_interpreted([(destination, values) for destination in found])
    assert not copies._groups
    for destination in found:
        expected = values.to(destination.dtype)
        nan = values.isnan()
        assert torch.equal(nan, destination.isnan())
        assert torch.equal(bits_of(destination)[~nan], bits_of(expected)[~nan])


# -- what is launched


def test_sixty_thousand_boxes_are_one_launch():
    boxes, rows, columns = 60_000, 4, 96
    live, shards = torch.empty(boxes * rows, columns, dtype=torch.bfloat16), torch.empty(boxes * rows, 8 * columns)
    slices = [(live[4 * i : 4 * i + 4], shards[4 * i : 4 * i + 4, 96:192]) for i in range(boxes)]
    (launch,) = launched(slices)
    assert len(launch.boxes) == boxes
    assert len(launch.tiles) == boxes
    assert launch.kind.columns == 128
    (equal,) = launched([(d, s.bfloat16()) for d, s in slices[:100]] + [(live[:4], live[4:8])])
    assert len(equal.boxes) == 101


def test_a_large_box_is_cut_into_tiles_of_16_kib():
    tensor = torch.empty(1 << 26, dtype=torch.bfloat16)
    (launch,) = launched([(tensor[: 1 << 25], tensor[1 << 25 :])])
    assert launch.kind[:4] == ("int64", "int64", 2, "rows")
    assert len(launch.tiles) == (1 << 26) // (16 << 10)
    assert sorted(launch.tiles.tolist()) == list(range(len(launch.tiles)))
    assert launch.tiles.tolist() != list(range(len(launch.tiles)))  # engine ranks do not read in the same order
    assert (np.diff(launch.tiles[:64]) == 1).all()


def test_more_than_31_bits_of_elements():
    """Only the last tiles are run: of what is not touched the memory is not there."""
    n = (1 << 31) + (1 << 20) + 7
    destination, source = (torch.empty(n + 1, dtype=torch.uint8)[1:] for _ in range(2))
    source[-9000:] = filled(9000)
    (launch,) = launched([(destination, source)])
    assert launch.kind.way == "shifted"
    tiles = torch.from_numpy(np.sort(launch.tiles)[-3:])
    copy_tables.interpreted_kernel().launch(launch.kind, torch.from_numpy(launch.boxes), tiles)
    assert torch.equal(destination[-8000:], source[-8000:])


# -- what kernels do not copy


def test_memory_that_kernels_do_not_reach_is_left_to_torch_by_pairs_of_dtypes():
    memory = filled(4096)
    far = memory[2048:]
    memory[16:32] = far[16:32] = 1  # torch's own copy makes True of any byte
    pairs = [
        (memory[:16].view(torch.float8_e8m0fnu), far[:16].view(torch.float8_e8m0fnu)),
        (memory[16:32].view(torch.bool), far[16:32].view(torch.bool)),
        (memory[32:64].view(torch.float32), far[32:48].view(torch.bfloat16)),
        (memory[64:96].view(torch.float32), far[64:96].view(torch.float32)),
        (memory[128:256].view(torch.float32), memory[256:384].view(torch.float32)),
    ]
    expected = copied_by_torch(memory, pairs)
    copies = run_interpreted(pairs, InterpretedGpu(lambda t: t.data_ptr() < far.data_ptr()))
    assert torch.equal(memory, expected)
    assert sum(len(boxes) for kernels in copies._kernels for _, boxes, _ in kernels.launches) == 1
    groups = [{(d.dtype, s.dtype) for d, s in zip(*group, strict=True)} for group in copies._groups]
    assert groups == [{(torch.int8, torch.int8)}, {(torch.float32, torch.bfloat16)}, {(torch.int32, torch.int32)}]


def test_dtypes_that_kernels_do_not_cast_and_shapes_that_torch_expands():
    memory = filled(4096)
    pairs = [(memory[:64].view(torch.bfloat16), memory[2048:2080].view(torch.float8_e4m3fn))]
    pairs += [(memory[128:256].view(torch.int32), memory[2304:2560].view(torch.int64))]
    pairs += [(memory[512:768].view(4, 64), memory[2560:2624])]
    expected = copied_by_torch(memory, pairs)
    copies = run_interpreted(pairs)
    assert not any(kernels.launches for kernels in copies._kernels)
    assert torch.equal(memory, expected)


def test_without_triton_torch_copies_and_a_warning_says_so(caplog):
    destination, source = torch.zeros(5), torch.arange(5.0)
    copies = CopyList()
    copies.add(destination, source)
    with interpreted(), caplog.at_level(logging.WARNING):
        sys.modules["sglang_reshard.copying.copy_kernel"] = None  # as if Triton were not there
        copies.build()
    copies.run()
    assert torch.equal(destination, source)
    assert "Triton cannot be used" in caplog.text


def test_a_host_without_gpus_imports_no_triton():
    code = (
        "import sys, torch; from sglang_reshard.copying.copy_list import CopyList; c = CopyList();"
        "c.add(torch.zeros(2), torch.ones(2)); before = 'triton' in sys.modules; c.build(); c.run();"
        "assert before == ('triton' in sys.modules); assert not c.table_bytes;"
        "assert 'sglang_reshard.copying.copy_kernel' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- plans of any layouts, by every transport


@pytest.mark.parametrize("first", [0, *map(sweep, range(20, 400, 20))])
def test_every_element_of_a_plan_lands_through_the_kernel(first):
    with interpreted() as gpu:
        for seed in range(first, first + 20):
            lands.hypothesis.inner_test(Random(seed))
    assert gpu.kernels


# -- for real GPUs


MOVES = {  # of a thread of a tile of 16 KiB, or where each move takes more registers of 8 KiB
    "aligned": {"ld.global.v2.b64": 8, "st.global.v2.b64": 8},
    "odd range": {"ld.global.b64": 16, "st.global.b64": 8, "ld.global.b8": 1, "st.global.b8": 1},
    "columns of an odd range": {"ld.global.b64": 16, "st.global.b64": 8, "ld.global.b8": 4, "st.global.b8": 4},
    "odd bytes": {"ld.global.b64": 16, "st.global.b64": 8, "ld.global.b8": 1, "st.global.b8": 1},
    "float32 to bfloat16": {"ld.global.v4.b32": 8, "st.global.v2.b32": 8},
    "bfloat16 to float32": {"ld.global.v2.b32": 8, "st.global.v4.b32": 8},
    "transposed": {"ld.global.v4.b32": 4, "st.global.v4.b32": 4},
    "transposed, float32 to bfloat16": {"ld.global.v4.b32": 8, "st.global.v2.b32": 8},
    "transposed, of odd sizes": {"ld.global.b16": 16, "st.global.b16": 16},
    "steps": {"ld.global.b16": 32, "st.global.b16": 32},
}


@pytest.mark.parametrize("capability", [90, sweep(80), sweep(100)])
def test_the_kernel_compiles_and_moves_words_however_pairs_are_aligned(capability):
    """In a process of its own: the interpreter replaces parts of Triton."""
    program = f"from support.copy_tables import ptx_of; print(ptx_of({capability}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = SimpleNamespace(**eval(done.stdout))
    assert {n: {m: k for m, k in of.items() if ".global" in m} for n, of in found.moves.items()} == MOVES
    in_shared_memory = {name: any(".shared" in move for move in moves) for name, moves in found.moves.items()}
    assert {name for name, is_so in in_shared_memory.items() if is_so} == {n for n in MOVES if "transposed" in n}
    assert found.unhinted == {"ld.global.b8", "st.global.b8"}  # the ends of rows share lines with other rows
    assert not found.flushes_subnormals
