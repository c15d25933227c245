"""Checksums of weights: a GPU's are a CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmark.gpu.copy_items import values
from benchmark.gpu.item import Bench, Item
from benchmark.gpu.place import DEVICE, free_bytes, room, seconds_of
from benchmark.gpu.rate_items import GOAL, judge
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.kernel_sums import can_compile
from sglang_reshard.landings.checked.regions import Selection
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
    """All elements of many tensors, and samples: of the engine's dtype, of columns, and of those that are cast."""
    size = bench.place.pick((8192, 4096), (256, 128))
    for name, (source, dtype) in {"bfloat16": ("bfloat16",) * 2, "float32 to bfloat16": _CASTS[0]}.items():
        for part in ("rows", "columns"):
            _rate_of(bench, f"{name}, {part}", size, getattr(torch, source), getattr(torch, dtype), part == "columns")


def _rate_of(
    bench: Bench, name: str, size: tuple[int, int], source: torch.dtype, dtype: torch.dtype, narrow: bool
) -> None:
    free_bytes()
    rows, columns = size
    nbytes = rows * columns * source.itemsize
    count = bench.fitted(f"tensors of {name}", 64, room() // 4 // nbytes)
    batch, memory = RegionBatch(), torch.empty((count, *size), dtype=source, device=DEVICE)
    for number, tensor in enumerate(memory):
        view = tensor.fill_(number)[:, : columns // 2] if narrow else tensor
        batch.add(
            RegionSpec.of(tuple(view.shape), Region.of(Box.whole(tuple(view.shape))), dtype, source != dtype),
            view,
            number,
        )
    nbytes = count * nbytes // (2 if narrow else 1)
    copied = memory.view(-1)[: nbytes // source.itemsize]
    other = torch.empty_like(copied)
    seen = {"bytes": nbytes, "one_copy": seconds_of(lambda: other.copy_(copied), rounds=3)}
    seen["ours"] = seconds_of(lambda: batch.checksums(count, Selection.full()), rounds=3)
    seen["sample"] = seconds_of(lambda: batch.checksums(count, Selection.sample(1)), rounds=3)
    if not bench.place.rehearsed:  # on virtual GPUs torch computes them
        judge(bench, can_compile(DEVICE), seen["ours"] / seen["one_copy"], GOAL, name)
    bench.saw(**{name: seen})


ITEMS = (Item(15, "digests", "a GPU's are a CPU's, for every dtype, layout and NaN, within 1.2 times a copy", equal),)
