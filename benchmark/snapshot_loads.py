"""A server's load of a snapshot, and SGLang's own load of the same folder: `make bench-snapshots`.

Two snapshots take turns, so that every load writes. Each way loads them from the disk, after their pages were dropped,
and from the page cache:

staged    engine ranks read into shadow weights, while requests could be served
in place  engine ranks read twice: to compare, and into the live weights
SGLang    POST /update_weights_from_disk

Bytes are what the kernel has read from the disk for the engine ranks, read-ahead included (/proc/PID/io). Needs
PYTHONPATH=test, whose servers it uses.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from benchmark import pages, results
from benchmark.models import Qwen3
from benchmark.results import Rows
from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.extras.snapshots.folders import LocalFolder, listed
from sglang_reshard.testing import cpu_host
from support.servers import launch, serving
from support.snapshot_writer import write_tensors

TPS, REPEATS = (2, 4), 5
MODEL = Qwen3(8, 2048, 3 * 2048, 16, 8, 128, 32_000, tied=False)
Load = Callable[[RemoteEngine, Path, int], None]


def _snapshot(staged: bool) -> Load:
    def load(engine: RemoteEngine, folder: Path, publication: int) -> None:
        done = engine.load_snapshot(str(folder), folder.name, publication, allow_rollback=True, staged=staged)
        if not done.success:
            raise RuntimeError(done.message)

    return load


def _stock(engine: RemoteEngine, folder: Path, _publication: int) -> None:
    engine.update_weights_from_disk(str(folder), folder.name, load_format="auto")


WAYS: dict[str, Load] = {"staged": _snapshot(True), "in place": _snapshot(False), "SGLang": _stock}


def _model(folder: Path) -> dict[str, torch.Tensor]:
    """Writes a model's configuration; returns its tensors, in bfloat16."""
    from sglang_reshard.selftest import tiny_model

    tiny_model.save(folder, 2, 2)  # a tokenizer
    (folder / "config.json").write_text(json.dumps(MODEL.config()))
    generator = torch.Generator().manual_seed(1)
    return {
        n: torch.randn(s, generator=generator, dtype=torch.float32).mul_(0.02).bfloat16()
        for n, s in MODEL.shapes().items()
    }


def _drop(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _ranks() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "scheduler" in " ".join(p.cmdline())]


def _measure(folder: Path, tp: int, nbytes: int, places: list[tuple[Path, int]]) -> Rows:
    """A row for each way, cold or warm. Seconds: median and range.

    call_bytes               that the rank that read most has read by system calls; mapped files are read without
    read_bytes, disk_bytes   from the disk, by the rank that read most and by all
    """
    command = launch(folder / "model", tp, "--dtype", "bfloat16")
    rows = []
    with serving(command, cpu_host.environment(tp), folder / f"log-{tp}") as url:
        engine, ranks, turn = RemoteEngine(url, timeout_s=300), _ranks(), 0
        if len(ranks) != tp:
            raise RuntimeError(f"{len(ranks)} schedulers, expected {tp}")
        found: dict[tuple[str, bool], list[tuple[float, int, int, int]]] = {}
        for number in range(REPEATS + 1):
            for way, load in WAYS.items():
                for cold in (True, False):
                    place, publication = places[turn % len(places)]
                    turn += 1
                    if cold:
                        _drop(place)
                    else:
                        [path.read_bytes() for path in place.glob("*.safetensors")]
                    before, began = [p.io_counters() for p in ranks], time.perf_counter()
                    load(engine, place, publication)
                    seconds = time.perf_counter() - began
                    pairs = [(p.io_counters(), was) for p, was in zip(ranks, before, strict=True)]
                    calls = [now.read_chars - was.read_chars for now, was in pairs]
                    disk = [now.read_bytes - was.read_bytes for now, was in pairs]
                    if number:  # the first round warms up
                        found.setdefault((way, cold), []).append((seconds, max(calls), max(disk), sum(disk)))
        for (way, cold), runs in found.items():
            times = [run[0] for run in runs]
            medians = [int(statistics.median(run[column] for run in runs)) for column in (1, 2, 3)]
            bytes_read = dict(zip(("call_bytes", "read_bytes", "disk_bytes"), medians, strict=True))
            seconds_of = {"seconds": statistics.median(times), "shortest": min(times), "longest": max(times)}
            rows.append({"tp": tp, "way": way, "cold": cold, "nbytes": nbytes, **seconds_of, **bytes_read})
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory(dir=results.REPOSITORY / "build") as temporary:
        folder = Path(temporary)
        (folder / "model").mkdir()
        tensors = _model(folder / "model")
        for version in (1, 2):
            write_tensors(folder / "run", f"step-{version}", tensors, copy_from=folder / "model")
            tensors = {name: tensor * 1.5 for name, tensor in tensors.items()}
        snapshots = listed(LocalFolder(folder / "run"))
        assert snapshots is not None
        places = [(folder / "run" / entry.name, entry.publication) for entry in snapshots.entries()]
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        rows = [row for tp in TPS for row in _measure(folder, tp, nbytes, places)]
    pages.publish("snapshot-loads", "make bench-snapshots", rows)


if __name__ == "__main__":
    main()
