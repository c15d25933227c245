"""Checksums of weights: a GPU's are a CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmark.gpu.copy_items import values
from benchmark.gpu.item import Bench, Item
from benchmark.gpu.place import DEVICE, room, seconds_of
from sglang_reshard.digest.checksum import RegionBatch, RegionSpec
from sglang_reshard.digest.selection import Selection
from sglang_reshard.layout.regions import ITEM_BYTES, Box, Region

_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda t: t,
    "columns": lambda t: t[:, 5:-3],
    "turned": lambda t: t.t(),
}
_CASTS = (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float32"))


def equal(bench: Bench) -> None:
    bench.enter()
    rows, columns = bench.place.pick((513, 1031), (33, 47))
    wrong, cases = [], 0
    for name, view, dtype, cast in _cases(rows, columns):
        for selection in (Selection.full(), Selection.sample(3)):
            cases += 1
            there, here = (_checksum(v, dtype, cast, selection) for v in (view, _on_host(view)))
            if there != here:
                wrong.append(name)
    bench.saw(cases=cases, wrong=wrong[:20])
    bench.check(not wrong, f"{len(wrong)} checksums differ: {wrong[:5]}")
    _rate(bench)


def _cases(rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor, torch.dtype, bool]]:
    for dtype in ITEM_BYTES:
        for way, view in _VIEWS.items():
            yield f"{dtype}, {way}", view(values(rows, columns, dtype)), getattr(torch, dtype), False
    for dtype, other in _CASTS:
        yield f"{dtype} to {other}", values(rows, columns, dtype), getattr(torch, other), True


def _on_host(view: torch.Tensor) -> torch.Tensor:
    """Returns the same elements in host memory, dense."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.element_size()]
    return view.view(integers).cpu().contiguous().view(view.dtype)


def _checksum(view: torch.Tensor, dtype: torch.dtype, cast: bool, selection: Selection) -> int:
    shape = tuple(view.shape)
    batch = RegionBatch()
    batch.add(RegionSpec.of(shape, Region.of(Box.whole(shape)), dtype, cast), view, 0)
    return int(batch.checksums(1, selection)[0])


def _rate(bench: Bench) -> None:
    rows, columns = bench.place.pick((8192, 4096), (256, 128))
    count = bench.fitted("tensors", 64, room() // 2 // (rows * columns * 2))
    batch, region = RegionBatch(), Region.of(Box.whole((rows, columns)))
    spec = RegionSpec.of((rows, columns), region, torch.bfloat16, cast=False)
    for number in range(count):
        tensor = torch.empty((rows, columns), dtype=torch.bfloat16, device=DEVICE)
        tensor.fill_(number)
        batch.add(spec, tensor, number)
    seconds = seconds_of(lambda: batch.checksums(count, Selection.full()), rounds=3, warmups=1)
    nbytes = count * rows * columns * 2
    bench.saw(bytes=nbytes, full_seconds=seconds, gb_per_s=nbytes / seconds / 1e9)
    seconds = seconds_of(lambda: batch.checksums(count, Selection.sample(1)), rounds=3, warmups=1)
    bench.saw(sample_seconds=seconds)


ITEMS = (Item(15, "digests", "those of a GPU are those of a CPU, for every dtype, layout and NaN", equal),)
