"""The battery for GPUs runs without one as far as that goes, and no item can hide, hang or end the others."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmark import pages
from benchmark.gpu import items, recording, runner
from benchmark.gpu.item import Item, Skip
from benchmark.gpu.place import Place, pattern

ROOT = Path(__file__).parents[2]


class Nowhere(Place):
    """Of processes that use no GPU."""

    def enter(self):
        pass


NOWHERE = Nowhere("a test")


def rehearsed(path, *options):
    command = [sys.executable, "-m", "benchmark.gpu", "--rehearse", "--out", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = {row["name"]: row for row in lines if "number" in row}
    return rows, lines[-1]["verdict"], done


@pytest.mark.sweep
def test_every_item_passes_on_virtual_gpus_or_says_why_it_cannot_run(tmp_path):
    rows, verdict, done = rehearsed(tmp_path / "gpu.json")
    failed = {name: row["why"] for name, row in rows.items() if row["verdict"] == "fail"}
    assert not failed, done.stderr[-4000:]
    assert {name for name, row in rows.items() if row["verdict"] == "skipped"} == {"watchdog"}
    assert rows.keys() == {item.name for item in items.ITEMS}
    assert verdict.startswith("rehearsed: no GPU; ")
    assert done.returncode == 0


def test_a_rehearsal_writes_a_row_for_each_item_and_the_page_shows_it(tmp_path):
    rows, _, done = rehearsed(tmp_path / "gpu.json", "--only", "NCCL alone", "watchdog")
    assert {name: row["verdict"] for name, row in rows.items()} == {"NCCL alone": "pass", "watchdog": "skipped"}
    assert done.returncode == 0, done.stderr
    head, *saved = json.loads((tmp_path / "gpu.json").read_text())
    assert saved == list(rows.values())
    assert head["host"]["gpus"] == []
    head["host"]["nccl"] = "2.28"
    (tmp_path / "gpu.json").write_text(json.dumps([head, *saved]))
    page = pages.gpu(tmp_path / "gpu.json")
    assert "| 13 | watchdog |" in page
    assert "skipped: virtual GPUs have no endless kernels" in page


def test_the_battery_needs_neither_sglang_nor_what_torch_does_not_bring():
    code = (
        "import sys, torch; known = {m.partition('.')[0] for m in sys.modules}\n"
        "from benchmark.gpu import facts, items, packages, runner\n"
        "new = {m.partition('.')[0] for m in sys.modules} - known - sys.stdlib_module_names\n"
        "torchs = {'mpmath', 'sympy', 'numpy', 'torch', 'triton', 'networkx', 'jinja2', 'markupsafe', 'torchgen'}\n"
        "print(*sorted(new - torchs - {'benchmark', 'sglang_reshard', *packages.NAMES}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def run(function, limit_s=20.0):
    (row,) = runner.run([Item(1, "an item", "nothing", function, limit_s=limit_s)], NOWHERE, 1)
    return row


def right(bench):
    bench.saw(one=1)
    bench.saw(two=2)


def wrong(bench):
    bench.check(True, "not this")
    bench.check(False, "this")
    bench.check(False, "and that")


def skipping(bench):
    raise Skip("it is Sunday")


def raising(bench):
    bench.saw(one=1)
    raise ValueError("broken")


def dying(bench):
    bench.saw(one=1)
    os._exit(7)


@pytest.mark.parametrize(
    ("function", "verdict", "why", "seen"),
    [
        (right, "pass", "", {"one": 1, "two": 2}),
        (wrong, "fail", "this; and that", {}),
        (skipping, "skipped", "it is Sunday", {}),
        (raising, "fail", "ValueError: broken", {"one": 1}),
        (dying, "fail", "the process ended with exit code 7", {"one": 1}),
    ],
)
def test_the_outcome_of_an_item_is_a_row(function, verdict, why, seen):
    row = run(function)
    assert (row.verdict, row.why, row.seen) == (verdict, why, seen)


def waiting(here, file):
    Path(file).write_text(str(os.getpid()))
    time.sleep(100)


def test_an_item_that_hangs_ends_at_its_limit_with_all_its_processes(tmp_path):
    file = tmp_path / "pid"

    def hanging(bench):
        bench.saw(one=1)
        bench.peer("other").call(waiting, str(file))

    row = run(hanging, limit_s=4.0)
    assert row.verdict == "fail"
    assert row.why == "did not end within 4 s; its stack is in the output"
    assert row.seen == {"one": 1}
    status = Path(f"/proc/{file.read_text()}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_what_needs_more_gpus_is_skipped_by_name():
    (row,) = runner.run([Item(20, "two GPUs: any", "", right, gpus=2)], NOWHERE, 1)
    assert (row.verdict, row.why) == ("skipped", "needs 2 GPUs")


def test_items_are_chosen_by_number_or_by_words():
    assert {item.number for item in items.chosen(["8"])} == {8}
    assert {item.number for item in items.chosen(["replay", "8"])} == {8, 18}
    assert items.chosen([]) == items.ITEMS
    with pytest.raises(SystemExit, match="no item is called 99"):
        items.chosen(["99"])


@pytest.mark.parametrize("name", recording.recorded())
def test_recordings_are_small_and_write_each_element_once(name):
    path = recording.recorded()[name]
    assert path.stat().st_size < 1 << 20
    found = recording.load(path)
    sizes = {name: numel for name, (numel, _) in found.targets.items()}
    written = dict.fromkeys(sizes, 0)
    for copy in found.copies:
        written[copy.target] += copy.region.numel
        last = copy.offset + sum((n - 1) * s for n, s in zip(copy.region.count, copy.strides, strict=True))
        assert last < sizes[copy.target]
    assert all(written[name] <= sizes[name] for name in sizes)


def test_a_pattern_depends_on_place_and_number():
    made = [torch.empty(5000, dtype=torch.uint8) for _ in range(2)]
    for number, tensor in enumerate(made):
        pattern(number, tensor)
    assert not torch.equal(*made)
    assert len(set(made[0].tolist())) > 200
