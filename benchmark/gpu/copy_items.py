"""Copies: whether every byte is right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmark.gpu.item import Bench, Item
from benchmark.gpu.peer import Here, everywhere
from benchmark.gpu.place import DEVICE, MIB, pattern, room, same_bytes
from sglang_reshard.copying.copy_list import CopyList
from sglang_reshard.layout.regions import ITEM_BYTES

Pair = tuple[torch.Tensor, torch.Tensor]  # destination, source
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_CASTS = ("float64", "float32", "float16", "bfloat16")


def copied(pairs: Sequence[Pair]) -> CopyList:
    """Returns these copies, ready to run."""
    copies = CopyList()
    for destination, source in pairs:
        copies.add(destination, source)
    copies.build()
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
    begin, parts = time.perf_counter(), bench.place.pick(min(6, len(os.sched_getaffinity(0))), 1)
    peers = [bench.peer(f"compiler {part}") for part in range(parts)]
    everywhere(peers, _build, rows, columns, parts, ranked=True)
    for peer in peers:
        peer.stop()
    bench.saw(compile_seconds=time.perf_counter() - begin)


def _build(here: Here, part: int, rows: int, columns: int, parts: int) -> None:
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
    wanted = bench.place.scaled((1 << 31) + (1 << 20))
    numel = bench.fitted("large_elements", wanted, room() // 5)  # two bytes each, on both sides
    if numel < wanted:
        bench.leave_open("no room for copies of more than 2^31 elements")
    source = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    pattern(1, source)
    destination = torch.empty(numel, dtype=torch.bfloat16, device=DEVICE)
    copied([(destination, source)]).run()
    torch.cuda.synchronize(DEVICE)
    bench.check(same_bytes(destination, source), f"a copy of {numel:,} elements was wrong")
    half = numel // 2048
    wide, narrow = source[: half * 2048].view(half, 2048)[:, 1:1025], destination[: half * 1024].view(half, 1024)
    copied([(narrow, wide)]).run()
    torch.cuda.synchronize(DEVICE)
    bench.check(_same_in_pieces(narrow, wide), "a copy of every other kilo of elements beyond 32 bits was wrong")


def _same_in_pieces(left: torch.Tensor, right: torch.Tensor) -> bool:
    """As `same_bytes`, for views that had better not be copied whole."""
    step = max(1, min(64 * MIB, left.nbytes // 256) // max(1, left[:1].nbytes))
    return all(same_bytes(left[i : i + step], right[i : i + step]) for i in range(0, left.shape[0], step))


ITEMS = (
    Item(6, "exact copies", "every dtype, layout and cast, and 2^31 + 2^20 elements: the bits of single copies", exact),
)
