"""The battery for GPUs runs without one as far as that goes, and no item can hide, hang or end the others."""

import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmark import pages
from benchmark.gpu import facts, items, rate_items, rehearsal, runner
from benchmark.gpu.item import Bench, Item, Skip
from benchmark.gpu.place import DEVICE, GIB, MIB, Place, pattern, same_bytes
from support.copy_tables import interpreted

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
@pytest.mark.parametrize("card_gib", rehearsal.CARDS_GIB)
def test_every_item_passes_on_virtual_cards_or_says_why_it_cannot_run(tmp_path, card_gib):
    rows, verdict, done = rehearsed(tmp_path / "gpu.json", "--card", str(card_gib))
    failed = {name: row["why"] for name, row in rows.items() if row["verdict"] == "fail"}
    assert not failed, done.stderr[-4000:]
    assert {name for name, row in rows.items() if row["verdict"] == "skipped"} == {"watchdog"}
    assert rows.keys() == {item.name for item in items.ITEMS}
    assert verdict.startswith("rehearsed: no GPU; ")
    assert done.returncode == 0


@pytest.mark.sweep
def test_items_that_once_needed_90_gib_fit_a_card_of_24_and_say_what_they_took(tmp_path):
    rows, _, done = rehearsed(tmp_path / "gpu.json", "--card", "22", "--only", "rate", "cost", "replay of qwen3-8b")
    assert {row["verdict"] for row in rows.values()} == {"pass"}, done.stderr[-4000:]
    cost, rate = rows["cost of copies"]["seen"], rows["rate"]["seen"]
    assert 0 < cost["60000_dense_copies"] < cost["60000_dense_copies_on_a_larger_card"] == 468
    assert 0 < rate["contiguous_bytes"] < rate["contiguous_bytes_on_a_larger_card"] == 8 * MIB
    replayed = rows["replay of qwen3-8b-tp4"]["seen"]
    assert 0 < replayed["source_bytes"] < replayed["source_bytes_of_the_model"]


def test_a_rehearsal_writes_a_row_for_each_item_and_the_page_shows_it(tmp_path):
    rows, _, done = rehearsed(tmp_path / "gpu.json", "--only", "NCCL alone", "watchdog")
    assert {name: row["verdict"] for name, row in rows.items()} == {"NCCL alone": "pass", "watchdog": "skipped"}
    assert done.returncode == 0, done.stderr
    head, *saved = json.loads((tmp_path / "gpu.json").read_text())
    assert saved == list(rows.values())
    assert head["host"]["gpus"] == []
    head["host"]["nccl"] = "2.28"
    (tmp_path / "gpu.json").write_text(json.dumps([head, *saved]))
    page = pages.TABLES["gpu"].text(tmp_path / "gpu.json")
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


def left_open(bench):
    bench.check(True, "not this")
    bench.leave_open("no scale here")
    bench.leave_open("no scale here")


def wrong_and_left_open(bench):
    bench.leave_open("no scale here")
    bench.check(False, "this")


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
        (left_open, "skipped", "no scale here", {}),
        (wrong_and_left_open, "fail", "this", {}),
        (skipping, "skipped", "it is Sunday", {}),
        (raising, "fail", "ValueError: broken", {"one": 1}),
        (dying, "fail", "the process ended with exit code 7", {"one": 1}),
    ],
)
def test_the_outcome_of_an_item_is_a_row(function, verdict, why, seen):
    row = run(function)
    assert (row.verdict, row.why, row.seen) == (verdict, why, seen)


def taking_all(bench):
    bench.enter()
    bench.here.kept["all"] = torch.empty(bench.place.scaled(77 * GIB), dtype=torch.uint8, device=DEVICE)


def taking_more(bench):
    bench.enter()
    torch.empty(bench.place.scaled(79 * GIB), dtype=torch.uint8, device=DEVICE)


def test_an_item_that_takes_more_than_the_card_fails_and_leaves_it_free():
    """Two take nearly all, one after the other: what an item had when it ended is free."""
    torch.ones(1 << 20).sum()  # OpenMP's threads are there, and are not in the forks
    with rehearsal.folder() as folder:
        place = Place("a test", folder, card_gib=78)
        work = [Item(n, f"item {n}", "", run) for n, run in enumerate((taking_all, taking_more, taking_all))]
        rows = list(runner.run(work, place, 1))
    assert [row.verdict for row in rows] == ["pass", "fail", "pass"], [row.why for row in rows]
    assert "CUDA out of memory" in rows[1].why


def test_a_rate_is_not_judged_where_torch_makes_the_copies():
    bench = Bench(dataclasses.replace(NOWHERE, rehearsed=""), lambda figures: None)
    rate_items.judge(bench, 1, 1.5, 1.2, "a list")
    assert bench.faults == ["a list: 1.50 times the seconds of one copy; the goal is 1.2"]
    rate_items.judge(bench, 0, 50.0, 1.2, "another list")
    assert len(bench.faults) == 1
    assert "torch" in bench.open[0]


def test_a_host_without_nvidia_smi_compiler_or_headers_is_described_all_the_same(tmp_path, monkeypatch):
    pytest.importorskip("triton")  # before the interpreter is: it has to be imported without
    with interpreted():
        assert facts.copied_by(torch.device("cpu")).startswith("Triton ")
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(facts.sysconfig, "get_path", lambda name: str(tmp_path))
        assert facts.driver()
        sys.modules["sglang_reshard.copying.copy_kernel"] = None  # as if Triton could not be used
        said = facts.copied_by(torch.device("cpu"))
    assert said == "torch's foreach, as Triton cannot be used: no C compiler and no Python.h"


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


def test_the_next_item_waits_until_the_last_process_of_a_group_has_ended():
    shell = subprocess.Popen(["sh", "-c", "sleep 0.5 & exit"], start_new_session=True, stdout=subprocess.PIPE)
    shell.wait()
    with shell.stdout as pipe:  # the sleeping process holds it
        assert select.select([pipe], [], [], 0) == ([], [], [])
        runner._wait_for_group(shell.pid, 20.0)
        assert select.select([pipe], [], [], 0) == ([pipe], [], [])


def test_a_run_goes_on_with_the_items_that_have_not_passed(tmp_path):
    path = tmp_path / "gpu.json"
    first, _, _ = rehearsed(path, "--only", "peer access", "watchdog")
    assert {name: row["verdict"] for name, row in first.items()} == {
        "two GPUs: peer access": "pass",
        "watchdog": "skipped",
    }
    second, verdict, _ = rehearsed(path, "--resume", "--only", "peer access", "watchdog", "NCCL alone")
    assert second.keys() == {"NCCL alone", "watchdog"}
    assert "2 passed, 0 failed, 1 skipped" in verdict
    head, *rows = json.loads(path.read_text())
    assert [row["name"] for row in rows] == ["two GPUs: peer access", "NCCL alone", "watchdog"]
    assert rows[0] == first["two GPUs: peer access"]
    path.write_text(json.dumps([head | {"commit": "another"}, *rows]))
    with pytest.raises(SystemExit, match="is of commit another"):
        facts.passed(path, head["host"])


def test_items_are_chosen_by_number_or_by_words():
    assert {item.number for item in items.chosen(["8"])} == {8}
    assert {item.number for item in items.chosen(["replay", "8"])} == {8, 18}
    assert items.chosen([]) == items.ITEMS
    with pytest.raises(SystemExit, match="no item is called 99"):
        items.chosen(["99"])


@pytest.mark.parametrize("numel", [0, 1, 70_000, 300_000])
def test_bytes_are_compared_in_pieces(numel):
    made = torch.empty(numel, dtype=torch.uint8)
    pattern(1, made)
    assert same_bytes(made, made.clone())
    for place in {0, numel // 2, numel - 1} if numel else ():
        other = made.clone()
        other[place] += 1
        assert not same_bytes(made, other)
    assert not same_bytes(made, torch.empty(numel + 1, dtype=torch.uint8))
