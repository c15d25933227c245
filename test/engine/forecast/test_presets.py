"""Every preset is planned for, with fewer layers, by the command; DeepSeek-V3 as its hand-written shapes are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmark import deepseek_v3
from sglang_reshard.cli.plan.checkpoint import presets
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import RankLocation, TensorIndex, plan_reads
from support import sglangs, zygote

pytestmark = [pytest.mark.engine]

# Source, target and layers of each preset; DeepSeek-V3 has a test of its own.
SIDES = {
    "qwen3-8b": ("tp=4", "tp=1,pp=2", 2),
    "llama-3.1-70b": ("fsdp=2,tp=4", "tp=4", 1),
    "qwen3-30b-a3b": ("hsdp=2x4", "tp=2,ep=2", 1),
    "qwen3-235b-a22b": ("fsdp=8", "tp=4,ep=2", 1),
}
DEADLINE_S = 900


def plan(*arguments: str, end: str = "pinned") -> tuple[int, str, str]:
    command = [sys.executable, "-m", "sglang_reshard", "plan", *arguments]
    # With the pinned one plans are made on the code paths of GPUs.
    environment = sglangs.environment(end) if end == "newest" else {**os.environ, zygote.VARIABLE: "gpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout, done.stderr


def planned(*arguments: str, end: str = "pinned") -> dict[str, Any]:
    code, out, err = plan(*arguments, "--json", end=end)
    assert code == 0, err
    return json.loads(out)


def test_the_newest_sglang_has_the_same_plan() -> None:
    preset = "qwen3-30b-a3b"
    source, target, layers = SIDES[preset]
    arguments = (preset, "--source", source, "--target", target, "--layers", str(layers))
    newest, pinned = (planned(*arguments, end=end) | {"seconds_by_step": {}} for end in ("newest", "pinned"))
    assert newest == pinned


def test_all_presets_are_tried() -> None:
    assert set(presets()) == {*SIDES, "deepseek-v3"}


@pytest.mark.parametrize("preset", SIDES)
def test_every_rank_gets_exactly_what_it_lacks(preset: str, tmp_path: Path) -> None:
    source, target, layers = SIDES[preset]
    picture = tmp_path / "plan.png"
    sides = ["--source", source, "--target", target, "--layers", str(layers)]
    found = planned(preset, *sides, "--plot", str(picture))
    assert picture.stat().st_size > 10_000
    assert found["transport"] == "p2p"
    assert found["refused"] == []
    engine_ranks, trainer_ranks = found["engine_ranks"], found["trainer_ranks"]
    received = sum(rank["received_bytes"] for rank in engine_ranks)
    assert all(rank["received_bytes"] == rank["least_bytes"] for rank in engine_ranks)
    assert received == sum(rank["sent_bytes"] for rank in trainer_ranks) == sum(map(sum, found["link_bytes"]))
    # All of the model reaches the engine, and what is whole on each of its ranks reaches each of them.
    assert found["model_bytes"] <= received < 1.2 * found["model_bytes"]
    assert max(rank["extra_bytes"] for rank in engine_ranks + trainer_ranks) <= 2 * (64 << 20)
    assert found["gather"]["engine_received_bytes"] == found["model_bytes"]


def test_deepseek_v3_is_as_its_shapes_say() -> None:
    """Sixteen engine ranks, each with sixteen experts, and one layer of them beside the dense ones."""
    layers, engines = 4, 16
    sides = ["--source", "fsdp=64", "--target", f"tp={engines},ep={engines}", "--layers", str(layers)]
    found = planned("deepseek-v3", *sides)

    def is_taken(name: str) -> bool:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        return layer is None or int(layer[1]) < layers

    whole = deepseek_v3.fsdp_layout(64)
    layout: SourceLayout = msgspec.structs.replace(whole, tensors=tuple(t for t in whole.tensors if is_taken(t.name)))
    assert found["tensors"] == len(layout.tensors)
    assert found["model_bytes"] == sum(t.spec.nbytes for t in layout.tensors)
    assert [rank["shard_bytes"] for rank in found["trainer_ranks"]] == list(layout.local_bytes())
    index = TensorIndex.of(layout)
    for rank in found["engine_ranks"]:
        copies = [c for c in deepseek_v3.copies(rank["rank"], engines, engines) if is_taken(c.source)]
        location = RankLocation(rank["rank"], engines, "engine host", ("trainer host",) * 64)
        assert rank["received_bytes"] == rank["least_bytes"] == plan_reads(index, copies, location).least_bytes()


def test_an_engine_that_the_heads_do_not_divide_is_named() -> None:
    code, out, _ = plan("qwen3-8b", "--source", "tp=4", "--target", "tp=64", "--layers", "1", "--json")
    assert code == 1
    (reason,) = json.loads(out)["refused"]
    assert "AssertionError" in reason
    assert "num_attention_heads=32, which is not divisible by tp=64" in reason
