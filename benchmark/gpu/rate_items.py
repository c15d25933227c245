"""What copies cost: launches, and the rate against a local copy of the same bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmark.gpu import sharing
from benchmark.gpu.copy_items import Pair, copied
from benchmark.gpu.item import Bench, Item
from benchmark.gpu.peer import Peer
from benchmark.gpu.place import DEVICE, GIB, Place, free_bytes, pattern, room, same_bytes, seconds_of

GOAL = 1.2  # times a copy on the same GPU
_SHAPE = 96, 2048  # of an expert's shard in Qwen3-30B-A3B, FSDP over 8 trainer ranks
_SMALL = 96, 256  # in a rehearsal, an eighth, of so many times fewer copies: in all a part in 1,024
_FEWER = 128
_COST_S = 30.0  # after which nothing is measured that is not judged


def judge(bench: Bench, launched: int, ratio: float, most: float, what: str) -> None:
    """Compares seconds, as a ratio to those of one copy of the bytes, if kernels were launched."""
    if not launched:
        bench.leave_open("torch works tensor by tensor, as Triton cannot be used: the rate is not judged")
    elif not bench.place.rehearsed:
        bench.check(ratio <= most, f"{what}: {ratio:.2f} times the seconds of one copy; the goal is {most}")


# -- 7: what a list of copies costs


def cost(bench: Bench) -> None:
    """The largest list that fits is the last one: of a smaller card it is a slice."""
    bench.enter()
    size, few = bench.place.pick((_SHAPE, 1), (_SMALL, _FEWER))
    _warm_up(size)
    end = time.monotonic() + _COST_S
    for shape in ("dense", "columns", "odd", "transposed"):
        for wanted in (1_000, 10_000, 60_000) if shape == "dense" else (10_000,):
            free_bytes()
            each = size[0] * size[1] * 2
            most = room() // ((4 if shape != "columns" else 5) * each)  # both sides of ours, and of one copy
            count = bench.fitted(f"{wanted}_{shape}_copies", wanted // few, most)
            if count:
                _cost_of(bench, f"{wanted}_{shape}", _pairs(count, size, shape), count * each, end)


def _cost_of(bench: Bench, name: str, pairs: list[Pair], nbytes: int, end: float) -> None:
    seen: dict[str, Any] = {"bytes": nbytes}
    limit = seen["one_copy"] = seconds_of(_whole_copy(nbytes), rounds=3)
    begin = time.perf_counter()
    ours = copied(pairs)
    ours.run()
    torch.cuda.synchronize(DEVICE)
    seen["prepare"] = time.perf_counter() - begin
    seen["ours"] = seconds_of(ours.run, rounds=5)
    seen["launches"] = {"ours": ours.launches}
    judge(bench, ours.launches, seen["ours"] / limit, 2 * GOAL, name)
    bench.saw(**{name: seen})  # should what follows take too long
    for what, measure in _others(bench.place, pairs).items():
        if time.monotonic() < end:
            with _reported(seen, f"{what}_error"):
                seen[what] = measure()
    seen["launches"]["counted"] = launches(bench.place, ours.run)
    bench.saw(**{name: seen})


def _others(place: Place, pairs: list[Pair]) -> dict[str, Callable[[], Any]]:
    """What is measured for comparison: other ways. Without the slow ones for many copies."""
    destinations, sources = [d for d, _ in pairs], [s for _, s in pairs]

    def foreach() -> None:
        torch._foreach_copy_(destinations, sources)

    found: dict[str, Callable[[], Any]] = {"foreach": lambda: seconds_of(foreach, rounds=1, warmups=1)}
    if len(pairs) > 10_000:
        return found
    found["one_by_one"] = lambda: seconds_of(lambda: [d.copy_(s) for d, s in pairs], rounds=1, warmups=1)
    if not place.rehearsed:
        found["graph"] = lambda: seconds_of(_graph_of(foreach), rounds=3)
    return found


def _pairs(count: int, size: tuple[int, int], shape: str) -> list[Pair]:
    """Copies of `size` rows and columns each.

    dense       one after the other
    columns     of sources that are twice as wide
    odd         of sources that begin at an odd element, as FSDP1's ranges may
    transposed  of sources that are contiguous along rows
    """
    rows, columns = size
    width = 2 * columns if shape == "columns" else columns
    memory = torch.empty(count * rows * width + 1, dtype=torch.bfloat16, device=DEVICE)
    memory.fill_(1.5)
    memory = memory[1:] if shape == "odd" else memory[:-1]
    destination = torch.empty((count, rows, columns), dtype=torch.bfloat16, device=DEVICE)
    if shape == "transposed":
        source = memory.view(count, columns, rows).transpose(1, 2)
    else:
        source = memory.view(count, rows, width)[:, :, (width - columns) // 2 :][:, :, :columns]
    return [(destination[i], source[i]) for i in range(count)]


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
    (rows, columns), few = bench.place.pick((_SHAPE, 1), (_SMALL, _FEWER))
    producer = bench.peer("producer")
    bench.enter()
    _warm_up((rows, columns))
    producer.call(sharing.ready)
    most = room() // 4  # there, here, and what is expected here
    count = bench.fitted("list_copies", 10_000 // few, most // (rows * columns * 2))
    large = bench.fitted("contiguous_bytes", bench.place.scaled(8 * GIB), most)
    for name, size, number in (("list", count * rows * columns * 2, 1), ("contiguous", large, 2)):
        _rate_of(bench, producer, name, size, number, (count, rows, columns))
        producer.call(sharing.drop)
        free_bytes()


def _rate_of(bench: Bench, producer: Peer, name: str, size: int, number: int, shape: tuple[int, int, int]) -> None:
    memory = sharing.mapped(producer.call(sharing.publish, [size], number))
    there = sharing.bytes_of(memory, 0, size)
    here = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    if name == "list":
        sources, destinations = (t.view(torch.bfloat16).view(shape) for t in (there, here))
        pairs = [(destinations[i], sources[i]) for i in range(shape[0])]
        del sources, destinations
    else:
        pairs = [(here, there)]
    ours = copied(pairs)
    seconds = seconds_of(ours.run)
    expected = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    pattern(number, expected)
    bench.check(same_bytes(here, expected), f"{name}: the bytes are not those of the other process")
    local = seconds_of(partial(here.copy_, expected))
    figures = {
        "bytes": size,
        "seconds": seconds,
        "local_copy_seconds": local,
        "torch_copy_of_mapping_seconds": seconds_of(partial(here.copy_, there)),
        "ratio": seconds / local,
        "tb_per_s_both_ways": 2 * size / seconds / 1e12,
    }
    bench.saw(**{f"{name}_{figure}": value for figure, value in figures.items()})
    judge(bench, ours.launches, seconds / local, GOAL, name)
    del there, ours, pairs
    memory.close()


ITEMS = (
    Item(7, "cost of copies", "few launches, within 2.4 times a copy of the bytes, odd and transposed ones, too", cost),
    Item(8, "rate", f"lists and 8 GiB of another process's memory within {GOAL} times a local copy", rate),
)
