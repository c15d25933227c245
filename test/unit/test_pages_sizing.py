"""The page about sizing has the numbers of `plan`, and these are those of the memory that they stand for."""

from __future__ import annotations

import mmap
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmark.gpu import recording
from sglang_reshard.cli.doctor import host
from sglang_reshard.cli.layouts import Source
from sglang_reshard.cli.plan.request import layout_of
from sglang_reshard.cli.plan.sizing import Sizing, TrainerSizing, engine_sizing, trainer_sizings
from sglang_reshard.extras.asynchronous.background import AsyncShardCopy
from sglang_reshard.landings.shadow import Shadow
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.memory.host_arena import HostArena
from sglang_reshard.memory.mapping import MemoryExporter
from sglang_reshard.memory.peer_memory import PeerMemory
from sglang_reshard.plan import TensorIndex
from sglang_reshard.protocol.messages import DEFAULT_BUCKET_BYTES
from sglang_reshard.routes.strategy import Strategy
from sglang_reshard.trace.program import Program
from support.documents import table

PAGE, EXAMPLE = "docs/usage/sizing.md", "qwen3-8b-tp4"
SPECS = [
    TensorSpec("embed", (37, 24), "float32"),  # uneven over 4 ranks
    TensorSpec("proj", (64, 128), "bfloat16"),
    TensorSpec("norm", (3,), "float32"),  # the last rank holds nothing of it
    TensorSpec("big", (512, 1024), "bfloat16"),
]


def shards_of(rank: int, ranks: int) -> list[torch.Tensor]:
    layout = layout_of(SPECS, Source(fsdp=ranks))
    found = []
    for spec, shape in zip(SPECS, layout.min_local_shapes(rank), strict=True):
        found.append(torch.zeros(shape if shape is not None else (0,), dtype=getattr(torch, spec.dtype)))
    return found


def of_rank(rank: int, ranks: int) -> TrainerSizing:
    return trainer_sizings(TensorIndex.of(layout_of(SPECS, Source(fsdp=ranks))), [0] * ranks)[rank]


# -- what is computed is what the memory takes


@pytest.mark.parametrize("rank", [0, 3])
def test_storages_and_shared_memory_are_the_exporters(rank: int) -> None:
    shards, exporter = shards_of(rank, 4), MemoryExporter(rank)
    before = len(os.listdir("/proc/self/fd"))
    handles = exporter.export(shards)
    opened = len(os.listdir("/proc/self/fd")) - before
    found = of_rank(rank, 4)
    assert found.storages == len(handles.storages) == opened
    pages = sum(-(-storage.nbytes // mmap.PAGESIZE) for storage in handles.storages)
    assert found.shm_bytes == pages * mmap.PAGESIZE


def test_an_engine_rank_maps_each_storage_once() -> None:
    shards = shards_of(0, 4)  # their storages own the descriptors
    handles = MemoryExporter(0).export(shards)
    before = mapped_files()
    memory = PeerMemory(0, handles)
    assert mapped_files() - before == of_rank(0, 4).storages
    memory.close()


def mapped_files() -> int:
    with open("/proc/self/maps") as maps:
        return sum(" (deleted)" in line and "/torch_" in line and " r--s " in line for line in maps)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_arena_takes_what_is_told(rank: int) -> None:
    shards = [shard for shard in shards_of(rank, 4) if shard.numel()]
    assert HostArena(shards, "trainer rank 0").storage.nbytes() == of_rank(rank, 4).arena_bytes


def test_the_copy_of_an_asynchronous_update_takes_what_is_told() -> None:
    shadow = AsyncShardCopy(0, (0,))
    shadow.take([(spec.name, shard) for spec, shard in zip(SPECS, shards_of(0, 1), strict=True)], partial=False)
    assert shadow.nbytes == of_rank(0, 1).async_bytes
    shadow.release()


def test_shadow_weights_take_what_is_told() -> None:
    recorded = recording.load(recording.recorded()[EXAMPLE])
    index = TensorIndex.of(recorded.layout)
    plan = recorded.read_plan(index, "host")
    targets = {"weight": torch.zeros(100), "scratch/x": torch.zeros(50)}
    program = Program((), targets)
    reading = Strategy("ipc", "", np.zeros((recorded.layout.trainer_ranks, recorded.engine_ranks), np.int64))
    found = engine_sizing(reading, recorded.engine_rank, plan, program, DEFAULT_BUCKET_BYTES)
    assert found.staged_bytes == Shadow(program).nbytes == 400
    assert found.delta_bytes == 0


# -- the page's example


@pytest.fixture(scope="module")
def example() -> Sizing:
    """Qwen3-8B from 8 FSDP ranks into TP=4, all weights sent. The recording is of engine rank 0."""
    recorded = recording.load(recording.recorded()[EXAMPLE])
    index = TensorIndex.of(recorded.layout)
    reads = recorded.read_plan(index, "host")
    program = recorded.program(torch.device("meta"))
    reading = Strategy("ipc", "", np.zeros((recorded.layout.trainer_ranks, recorded.engine_ranks), np.int64))
    held = recorded.layout.local_bytes()
    trainers = trainer_sizings(index, held)
    return Sizing(trainers, (engine_sizing(reading, 0, reads, program, DEFAULT_BUCKET_BYTES),))


def numbers(cell: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", cell)]


def test_the_example_of_the_page_is_what_the_code_computes(example: Sizing) -> None:
    rows = {row[0].strip("`"): row[1] for row in table(PAGE, "## One model as an example")}
    trainer, engine = example.trainer_ranks[0], example.engine_ranks[0]
    expected = {name: getattr(trainer, name) for name in TrainerSizing.__struct_fields__}
    expected |= {"mappings": engine.mappings, "staged_bytes": engine.staged_bytes}
    expected["shm_bytes of the host"] = sum(rank.shm_bytes for rank in example.trainer_ranks[:8])
    assert {name: numbers(cell)[0] for name, cell in rows.items()} == expected


def test_limits_of_the_page_are_the_doctors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The doctor changes its mind at the numbers that the page says."""
    rows = {row[0].strip("`"): row[2] for row in table(PAGE, "## Limits of the host")}

    def descriptors(limit: int) -> str:
        monkeypatch.setattr(host.resource, "getrlimit", lambda _: (limit, limit))
        return host.check_descriptors()[0].status

    def mappings(limit: int) -> str:
        (tmp_path / "most").write_text(str(limit))
        monkeypatch.setattr(host, "MAX_MAP_COUNT", tmp_path / "most")
        return host.check_mappings()[0].status

    def shared_memory(free: int) -> str:
        monkeypatch.setattr(host.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(free, 0, free))
        return host.check_shared_memory()[0].status

    few, enough = numbers(rows["ulimit -n"])
    assert [descriptors(n) for n in (few - 1, few, enough - 1, enough)] == ["fail", "warning", "warning", "ok"]
    (most,) = numbers(rows["vm.max_map_count"])
    assert [mappings(n) for n in (most - 1, most)] == ["warning", "ok"]
    few, enough = (int(n) << {"M": 20, "G": 30}[unit] for n, unit in re.findall(r"(\d+) ([MG])iB", rows["/dev/shm"]))
    assert [shared_memory(n) for n in (few - 1, few, enough - 1, enough)] == ["fail", "warning", "warning", "ok"]
