"""Copies: whether every byte is right, what a launch costs, and the rate against a local copy of the same bytes."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmark.gpu import sharing
from benchmark.gpu.item import Bench, Item
from benchmark.gpu.peer import Here
from benchmark.gpu.place import DEVICE, GIB, MIB, Place, free_bytes, pattern, same_bytes, seconds_of
from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.copying.copy_table import DEFAULT_TILING, Tiling
from sglang_reshard.copying.kernel_copies import KernelCopies
from sglang_reshard.layout.regions import ITEM_BYTES

Pair = tuple[torch.Tensor, torch.Tensor]  # destination, source
SHAPE = 96, 2048  # of an expert's shard in Qwen3-30B-A3B, FSDP over 8 trainer ranks
_SMALL = 6, 128
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
GOAL = 1.2  # times a copy on the same GPU
_CASTS = ("float64", "float32", "float16", "bfloat16")


def copied(pairs: Sequence[Pair], tiling: Tiling = DEFAULT_TILING) -> CopyList:
    """Returns these copies, ready to run."""
    copies = CopyList()
    for destination, source in pairs:
        copies.add(destination, source)
    copies.build(tiling)
    return copies


# -- 6: every byte


def exact(bench: Bench) -> None:
    rows, columns = bench.place.pick((1000, 1000), (24, 40))
    _compile(bench, rows, columns)
    bench.enter()
    wrong = []
    for name, pair in _cases(rows, columns):
        destination, source = pair
        expected = _by_torch(destination, source)
        _cleared(destination)
        copied([pair]).run()
        torch.cuda.synchronize(DEVICE)
        if not _equal(destination, expected):
            wrong.append(name)
    together = list(_cases(rows, columns))
    copied([pair for _, pair in together]).run()
    torch.cuda.synchronize(DEVICE)
    for name, (destination, source) in together:
        if not _equal(destination, _by_torch(destination, source)):
            wrong.append(f"{name}, in one list with all others")
    bench.saw(cases=len(together), wrong=wrong[:20])
    bench.check(not wrong, f"{len(wrong)} copies were wrong: {wrong[:5]}")
    _large(bench)


def _compile(bench: Bench, rows: int, columns: int) -> None:
    """Compiles all kernels in several processes at once; Triton keeps them in its folder."""
    begin, parts = time.perf_counter(), bench.place.pick(6, 1)
    peers = [bench.peer(f"compiler {part}") for part in range(parts)]
    for part, peer in enumerate(peers):
        peer.start(_build, rows, columns, part, parts)
    for peer in peers:
        peer.result()
        peer.stop()
    bench.saw(compile_seconds=time.perf_counter() - begin)


def _build(here: Here, rows: int, columns: int, part: int, parts: int) -> None:
    pairs = sorted((pair for _, pair in _cases(rows, columns)), key=lambda pair: str((pair[1].dtype, pair[0].dtype)))
    copied(pairs[len(pairs) * part // parts : len(pairs) * (part + 1) // parts])


def _by_torch(destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns what a single copy writes; equal dtypes as integers, as torch cannot copy some others on a GPU."""
    expected = torch.empty(tuple(destination.shape), dtype=destination.dtype, device=DEVICE)
    if destination.dtype == source.dtype:
        unit = _INTEGERS[source.element_size()]
        expected.view(unit).copy_(source.view(unit))
    else:
        expected.copy_(source)
    return expected


def _cleared(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.uint8).zero_()


def _cases(rows: int, columns: int) -> Iterator[tuple[str, Pair]]:
    """Yields copies of every dtype, and casts; of dense memory, rows, columns, steps and turned ones."""
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "dense": lambda t: t,
        "rows": lambda t: t[3:-2],
        "columns": lambda t: t[:, 5:-3],
        "steps": lambda t: t[::2, ::3],
        "turned": lambda t: t.t(),
    }
    for dtype in ITEM_BYTES:
        for way, view in views.items():
            source = view(values(rows, columns, dtype))
            yield f"{dtype}, {way}", (torch.empty_like(source, memory_format=torch.contiguous_format), source)
    for dtype in _CASTS:
        for other in (d for d in _CASTS if d != dtype):
            for way in ("dense", "columns", "turned"):
                source = views[way](values(rows, columns, dtype))
                destination = torch.empty(tuple(source.shape), dtype=getattr(torch, other), device=DEVICE)
                yield f"{dtype} to {other}, {way}", (destination, source)


def values(rows: int, columns: int, dtype: str) -> torch.Tensor:
    """Every pattern of bits that two bytes have, or that the dtype does: NaNs and infinities, too."""
    found = torch.empty((rows, columns), dtype=getattr(torch, dtype), device=DEVICE)
    if dtype == "bool":
        found.copy_(torch.arange(rows * columns, device=DEVICE).view(rows, columns) % 3 == 0)
        return found
    places = torch.arange(rows * columns, dtype=torch.int64, device=DEVICE)
    bits = (places * 2654435761 + (places << 40) * 40503) >> 7  # each byte takes all values
    integers = _INTEGERS[found.element_size()]
    found.view(-1).view(integers).copy_(bits.to(integers))
    return found


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compares bits; NaNs of a cast are equal whatever their patterns."""
    if same_bytes(left, right):
        return True
    if not left.dtype.is_floating_point:
        return False
    wide = [t.to(torch.float64) for t in (left, right)]
    return bool(((wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan())).all())


def _large(bench: Bench) -> None:
    """More elements than 32 bits count."""
    numel = bench.place.pick((1 << 31) + (1 << 20), MIB)
    source = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    pattern(1, source)
    destination = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    copied([(destination, source)]).run()
    torch.cuda.synchronize(DEVICE)
    right = _same_in_pieces(destination, source)
    bench.check(right, f"a copy of {numel:,} elements was wrong")
    half = numel // 2 // 1024
    wide, narrow = source.view(-1, 2048)[:half, 1:1025], destination[: half * 1024].view(half, 1024)
    copied([(narrow, wide)]).run()
    torch.cuda.synchronize(DEVICE)
    bench.check(_same_in_pieces(narrow, wide), "a copy of every other kilo of elements beyond 32 bits was wrong")
    bench.saw(large_elements=numel)


def _same_in_pieces(left: torch.Tensor, right: torch.Tensor) -> bool:
    step = max(1, (64 * MIB) // max(1, left[:1].numel()))
    return all(same_bytes(left[i : i + step], right[i : i + step]) for i in range(0, left.shape[0], step))


# -- 7: what a list of copies costs


def cost(bench: Bench) -> None:
    bench.enter()
    counts, size = bench.place.pick((1_000, 10_000, 60_000), (2, 4)), bench.place.pick(SHAPE, _SMALL)
    _warm_up(size)
    for count in counts:
        for shape in ("dense", "columns"):
            if shape == "columns" and count > 20_000:
                continue  # twice the memory
            pairs = _pairs(count, size, shape)
            nbytes = count * size[0] * size[1] * 2
            seen: dict[str, Any] = {"bytes": nbytes}
            limit = seconds_of(_whole_copy(nbytes), rounds=3)
            seen["one_copy"] = limit
            begin = time.perf_counter()
            ours = copied(pairs)
            ours.run()
            torch.cuda.synchronize(DEVICE)
            seen["prepare"] = time.perf_counter() - begin
            _measure(bench, pairs, ours, seen)
            bench.saw(**{f"{count}_{shape}": seen})
            if not bench.place.rehearsed:
                ratio = seen["ours"] / limit
                bench.check(ratio < 2 * GOAL, f"{count} {shape} copies take {ratio:.1f} times a copy of their bytes")
            del pairs, ours
            free_bytes()


def _measure(bench: Bench, pairs: list[Pair], ours: CopyList, seen: dict[str, Any]) -> None:
    destinations, sources = [d for d, _ in pairs], [s for _, s in pairs]
    few = len(pairs) <= 10_000  # the others take long

    def foreach() -> None:
        torch._foreach_copy_(destinations, sources)

    rounds = 3 if few else 1
    seen["ours"] = seconds_of(ours.run, rounds=5)
    seen["foreach"] = seconds_of(foreach, rounds=rounds, warmups=1)
    seen["launches"] = {"ours": launches(bench.place, ours.run)}
    if few:
        seen["launches"]["foreach"] = launches(bench.place, foreach)
        seen["one_by_one"] = seconds_of(lambda: [d.copy_(s) for d, s in pairs], rounds=1, warmups=1)
    if not bench.place.rehearsed and few:
        with _reported(seen, "graph_error"):
            seen["graph"] = seconds_of(_graph_of(foreach), rounds=3)
        with _reported(seen, "batch_memcpy_error"):
            seen["batch_memcpy"] = seconds_of(_batch_memcpy(pairs), rounds=3)
    if few:
        seen["tilings"] = {
            name: seconds_of(copied(pairs, tiling).run, rounds=3) for name, tiling in _tilings(bench.place).items()
        }
        seen["warps"] = {str(warps): _with_warps(pairs, warps) for warps in bench.place.pick((2, 4, 8), (4,))}


def _tilings(place: Place) -> dict[str, Tiling]:
    return {
        f"{nbytes >> 10} KiB, runs of {run}": Tiling(nbytes=nbytes, elements=nbytes // 4, run=run)
        for nbytes in place.pick((8 << 10, 16 << 10, 32 << 10), (32 << 10,))
        for run in place.pick((1, 64), (64,))
    }


def _with_warps(pairs: list[Pair], warps: int) -> float:
    from sglang_reshard.copying.copy_kernel import launch

    copies, _ = KernelCopies.of(pairs, DEVICE)

    def run() -> None:
        for kind, boxes, tiles in copies.launches:
            launch(kind, boxes, tiles, warps)

    return seconds_of(run, rounds=3)


def _pairs(count: int, size: tuple[int, int], shape: str) -> list[Pair]:
    """Copies of `size` rows and columns each; "columns" of sources that are twice as wide."""
    rows, columns = size
    width = 2 * columns if shape == "columns" else columns
    source = torch.empty((count, rows, width), dtype=torch.bfloat16, device=DEVICE)
    destination = torch.empty((count, rows, columns), dtype=torch.bfloat16, device=DEVICE)
    source.fill_(1.5)
    first = columns // 2 if shape == "columns" else 0
    return [(destination[i], source[i, :, first : first + columns]) for i in range(count)]


def _whole_copy(nbytes: int) -> Callable[[], Any]:
    """A copy of so many bytes within the GPU: what hardware and driver can do."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    destination = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    source.fill_(3)
    return lambda: destination.copy_(source)


def _graph_of(run: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(DEVICE).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: order of access to the source, hints of both locations (type, id), flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


def _batch_memcpy(pairs: list[Pair]) -> Callable[[], None]:
    """The driver's cuMemcpyBatchAsync, which knows runs of bytes only."""
    assert all(source.is_contiguous() for _, source in pairs), "rows would be one copy each"
    count = len(pairs)
    to = (ctypes.c_uint64 * count)(*(d.data_ptr() for d, _ in pairs))
    of = (ctypes.c_uint64 * count)(*(s.data_ptr() for _, s in pairs))
    sizes = (ctypes.c_size_t * count)(*(s.nbytes for _, s in pairs))
    attributes, first = _Attributes(order=1), ctypes.c_size_t(0)  # in the stream's order
    stream = torch.cuda.Stream(DEVICE)  # the default stream is refused
    call = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2  # of CUDA 13

    def run() -> None:
        stream.wait_stream(torch.cuda.current_stream(DEVICE))
        code = call(
            to,
            of,
            sizes,
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            ctypes.c_void_p(stream.cuda_stream),
        )
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {code}")

    return run


@contextlib.contextmanager
def _reported(seen: dict[str, Any], name: str) -> Iterator[None]:
    """What is measured for comparison only may not work here."""
    try:
        yield
    except Exception as error:
        seen[name] = f"{type(error).__name__}: {str(error)[:200]}"


def launches(place: Place, run: Callable[[], Any]) -> int | None:
    """Returns how many kernels and copies `run` starts; None where that cannot be counted."""
    if place.rehearsed:
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize(DEVICE)
        return sum(event.count for event in profiler.key_averages() if event.device_type.name == "CUDA")
    except Exception:
        return None


def _warm_up(size: tuple[int, int]) -> None:
    for shape in ("dense", "columns"):
        seconds_of(copied(_pairs(2, size, shape)).run, rounds=1)


# -- 8: the rate from another process's memory


def rate(bench: Bench) -> None:
    (rows, columns), count = bench.place.pick((SHAPE, 10_000), (_SMALL, 3))
    large = bench.place.pick(8 * GIB, MIB)
    producer = bench.peer("producer")
    bench.enter()
    _warm_up((rows, columns))
    for name, size, number in (("list", count * rows * columns * 2, 1), ("contiguous", large, 2)):
        handles = producer.call(sharing.publish, [size], number)
        memory = sharing.mapped(handles)
        there = sharing.bytes_of(memory, 0, size)
        here = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        if name == "list":
            source = there.view(torch.bfloat16).view(count, rows, columns)
            destination = here.view(torch.bfloat16).view(count, rows, columns)
            pairs = [(destination[i], source[i]) for i in range(count)]
        else:
            pairs = [(here, there)]
        ours = copied(pairs)
        seconds = seconds_of(ours.run)
        expected = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        pattern(number, expected)
        bench.check(same_bytes(here, expected), f"{name}: the bytes are not those of the other process")
        local = seconds_of(partial(here.copy_, expected))
        torch_alone = seconds_of(partial(here.copy_, there))
        bench.saw(
            **{
                f"{name}_bytes": size,
                f"{name}_seconds": seconds,
                f"{name}_local_copy_seconds": local,
                f"{name}_torch_copy_of_mapping_seconds": torch_alone,
                f"{name}_ratio": seconds / local,
                f"{name}_tb_per_s_both_ways": 2 * size / seconds / 1e12,
            }
        )
        if not bench.place.rehearsed:
            bench.check(
                seconds / local <= GOAL, f"{name}: {seconds / local:.2f} times a local copy; the goal is {GOAL}"
            )
        del there, ours, pairs, here, expected
        if name == "list":
            del source, destination
        memory.close()
        producer.call(sharing.drop)
        free_bytes()


ITEMS = (
    Item(6, "exact copies", "every dtype, layout and cast, and 2^31 + 2^20 elements: the bits of single copies", exact),
    Item(7, "cost of copies", "a few launches for any list, within 2.4 times a copy of its bytes", cost),
    Item(8, "rate", f"lists and 8 GB of another process's memory within {GOAL} times a local copy", rate),
)
