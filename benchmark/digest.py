"""What digests cost beside a copy of the same bytes, on one core without a GPU: `python -m benchmark.digest`.

Seconds are of this process's one thread (CPU time), and so others on the host do not add their own to them, though
they take room in its caches: a digest and the copy beside it are taken in turn, and the least of their times counts.
"MoE" has the shapes of a small mixture of experts, for what many small tensors cost. What is done once for a trace,
and not in every update, is measured for DeepSeek-V3, too.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import torch

from benchmark import deepseek_v3, pages, results
from benchmark.results import Row
from sglang_reshard.landings.checked.regions import RegionSet, Selection
from sglang_reshard.landings.checked.source import SourceChecksums
from sglang_reshard.landings.checked.target import TargetChecksums
from sglang_reshard.layout.regions import Region
from sglang_reshard.layout.source_layout import Mesh, Placement, SourceLayout, SourceTensor
from sglang_reshard.plan import TensorIndex
from sglang_reshard.trace.program import Copy, Program

ONE_IN, TIMES = 64, 7
MATRICES, MATRIX = 64, (2048, 4096)  # 1 GiB of bfloat16
LAYERS, EXPERTS, HIDDEN, INTER, RANKS = 13, 128, 512, 192, 8  # 5,019 tensors
DEEPSEEK_TRAINERS, DEEPSEEK_ENGINES = 64, 32
T = TypeVar("T")


class Weight(NamedTuple):
    """A tensor, and the dimension that engine ranks split; None when every rank takes it whole."""

    name: str
    shape: tuple[int, ...]
    dim: int | None


def moe() -> Iterator[Weight]:
    for layer in range(LAYERS):
        yield Weight(f"{layer}.norm", (HIDDEN,), None)
        yield Weight(f"{layer}.router", (EXPERTS, HIDDEN), None)
        for expert in range(EXPERTS):
            yield Weight(f"{layer}.{expert}.gate", (INTER, HIDDEN), 0)
            yield Weight(f"{layer}.{expert}.up", (INTER, HIDDEN), 0)
            yield Weight(f"{layer}.{expert}.down", (HIDDEN, INTER), 1)
    yield Weight("norm", (HIDDEN,), None)


def layout_of(weights: Sequence[Weight], trainer_ranks: int, dtype: str) -> SourceLayout:
    """Every tensor split over the trainer ranks along dimension 0."""
    mesh = Mesh((trainer_ranks,), tuple(range(trainer_ranks)))
    tensors = tuple(SourceTensor(w.name, w.shape, dtype, 0, 0) for w in weights)
    return SourceLayout(trainer_ranks, (mesh,), ((Placement(0),),), tensors)


def copies(weights: Sequence[Weight], rank: int, ranks: int) -> list[Copy]:
    """What engine rank `rank` keeps, one after the other in one live tensor."""
    found, end = [], 0
    for w in weights:
        count = tuple(n // ranks if d == w.dim else n for d, n in enumerate(w.shape))
        start = tuple(rank * n if d == w.dim else 0 for d, n in enumerate(count))
        strides = tuple(math.prod(count[d + 1 :]) for d in range(len(count)))
        found.append(Copy(w.name, Region(start, count, (1,) * len(count)), "live", end, strides))
        end += math.prod(count)
    return found


def measure(case: str, weights: Sequence[Weight], ranks: int, trainer_dtype: str) -> Iterator[Row]:
    """Of the first of as many trainer ranks as engine ranks, which keep bfloat16."""
    layout = layout_of(weights, ranks, trainer_dtype)
    catalog = TensorIndex.of(layout)
    programs = [Program(tuple(copies(weights, r, ranks)), {}) for r in range(ranks)]
    elements = sum(copy.region.numel for copy in programs[0].copies)
    live = torch.randn(elements).to(torch.bfloat16)
    for program in programs:  # all ranks': only the first one's is read
        program.targets["live"] = live
    targets = [TargetChecksums(catalog, program) for program in programs]
    yield from _rows(case, "engine rank", targets[0].compute, len(targets[0].regions), [live], torch.bfloat16)
    shards = [torch.randn(w.shape[0] // ranks, *w.shape[1:]).to(getattr(torch, trainer_dtype)) for w in weights]
    source = SourceChecksums(layout, shards, 0, [target.regions for target in targets])
    yield from _rows(case, "trainer rank", source.compute, len(weights), shards, torch.bfloat16)


def _rows(
    case: str,
    side: str,
    digests: Callable[[Selection], object],
    tensors: int,
    read: Sequence[torch.Tensor],
    kept: torch.dtype,
) -> Iterator[Row]:
    """Yields a rank's digest of all that it holds, and of a sample of it.

    side             whose memory is read: a trainer rank casts what it reads
    elements, bytes  that the rank has, in its own dtype; ns_per_element and gb_per_s are of all of them, also where
                     a sample reads a few
    copy_seconds     of a copy of all of the bytes to bfloat16 in the same run
    """
    elements = sum(t.numel() for t in read)
    nbytes = sum(t.nbytes for t in read)
    into = [torch.zeros_like(t, dtype=kept) for t in read]
    ways = {"full": Selection.full(), f"sample of one row in {ONE_IN}": Selection.sample(0, ONE_IN)}
    least: dict[str, float] = {}
    for _ in range(TIMES):
        for name, selection in ways.items():
            least[name] = min(least.get(name, math.inf), _timed(lambda s=selection: digests(s))[0])  # type: ignore[misc]
        least["copy"] = min(least.get("copy", math.inf), _timed(lambda: torch._foreach_copy_(into, list(read)))[0])
    for name in ways:
        seconds, copy = least[name], least["copy"]
        yield {
            "case": case,
            "side": side,
            "selection": name,
            "tensors": tensors,
            "elements": elements,
            "bytes": nbytes,
            "seconds": seconds,
            "copy_seconds": copy,
            "times_copy": seconds / copy,
            "ns_per_element": seconds / elements * 1e9,
            "gb_per_s": nbytes / seconds / 1e9,
        }


def prepare_moe() -> Row:
    weights = list(moe())
    layout = layout_of(weights, RANKS, "float32")
    return prepare("MoE", layout, [copies(weights, rank, RANKS) for rank in range(RANKS)])


def prepare_deepseek() -> Row:
    copied = [
        [c for c in deepseek_v3.copies(rank, DEEPSEEK_ENGINES, DEEPSEEK_ENGINES) if min(c.region.count) > 0]
        for rank in range(DEEPSEEK_ENGINES)
    ]
    return prepare("DeepSeek-V3, ep=32", deepseek_v3.fsdp_layout(DEEPSEEK_TRAINERS), copied)


def prepare(case: str, layout: SourceLayout, copied: Sequence[Sequence[Copy]]) -> Row:
    """What is made once for a trace: by one engine rank, and by one trainer rank for all engine ranks.

    On tensors without bytes, as preparing reads none. regions_bytes: of one engine rank's region set, encoded.
    """
    catalog = TensorIndex.of(layout)
    dtypes = {t.name: getattr(torch, t.dtype) for t in layout.tensors}
    regions: list[RegionSet] = []
    target_seconds = 0.0
    for own in copied:
        ends: dict[str, tuple[int, torch.dtype]] = {}
        for copy in own:
            last = copy.offset + sum((n - 1) * s for n, s in zip(copy.region.count, copy.strides, strict=True))
            ends[copy.target] = max(ends.get(copy.target, (0,))[0], last + 1), dtypes[copy.source]
        targets = {name: torch.empty(end, dtype=dtype, device="meta") for name, (end, dtype) in ends.items()}
        program = Program(tuple(own), targets)
        target_seconds, target = _timed(lambda program=program: TargetChecksums(catalog, program))  # type: ignore[misc]
        regions.append(target.regions)
    shards = [
        torch.empty(catalog.tensor_class(i).shard_map.min_local_shape(0) or (0,), dtype=dtypes[t.name], device="meta")
        for i, t in enumerate(layout.tensors)
    ]
    source_seconds, _ = _timed(lambda: SourceChecksums(layout, shards, 0, regions))
    return {
        "case": case,
        "tensors": len(layout.tensors),
        "trainer_ranks": layout.trainer_ranks,
        "engine_ranks": len(regions),
        "target_seconds": target_seconds,
        "source_seconds": source_seconds,
        "regions": len(regions[-1]),
        "regions_bytes": len(msgspec.msgpack.encode(regions[-1])),
    }


def _timed(step: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    found = step()
    return time.process_time() - began, found


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    matrices = [Weight(f"{i}", MATRIX, 0) for i in range(MATRICES)]
    cases = [(f"64 matrices, {dtype} -> bfloat16", matrices, 1, dtype) for dtype in ("bfloat16", "float32")]
    cases.append((f"MoE, fsdp={RANKS} -> tp={RANKS}, float32 -> bfloat16", list(moe()), RANKS, "float32"))
    rows = [row for case in cases for row in measure(*case)]
    rows += [prepare_moe(), prepare_deepseek()]
    pages.publish("digest", "python -m benchmark.digest", rows, [results.load_of_host()])


if __name__ == "__main__":
    main()
