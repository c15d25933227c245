"""The self-test's choices and judgement: it says no to whatever is not proved. No SGLang, and tiny processes only."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from sglang_reshard.cli.layouts import Source, StagedTarget, Target, parsed
from sglang_reshard.errors import DeadlineExceeded, ReshardError, Unsupported
from sglang_reshard.selftest import children, tiny_model
from sglang_reshard.selftest.choice import GIB, Wanted, needed_bytes, runs
from sglang_reshard.selftest.events import EventReader, EventWriter, Finished, Row, Started
from sglang_reshard.selftest.host import Host
from sglang_reshard.selftest.reference import Distance
from sglang_reshard.selftest.table import advice, all_right, print_result
from sglang_reshard.selftest.verl_steps import judged

SMALL_HOST = Host(gpus=(), gpu_bytes=0, memory_bytes=24 * GIB, cores=2)


def gpus(count: int, gib: int = 80) -> Host:
    return Host(gpus=("NVIDIA H100",) * count, gpu_bytes=gib * GIB, memory_bytes=128 * GIB, cores=16)


def test_without_a_gpu_the_first_run_expands_and_a_process_is_killed_in_the_middle() -> None:
    first, *others = runs(SMALL_HOST, Wanted())
    assert (first.source, first.target) == (Source(tp=4), Target(tp=16))
    assert {run.name.partition(":")[0] for run in others} == {"experts", "mishaps", "contracting", "HSDP"}
    assert all(run.device == "cpu" for run in (first, *others))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 64])
def test_on_gpus_every_rank_has_one_and_the_first_run_shares_them_all(count: int) -> None:
    chosen = runs(gpus(count), Wanted())
    first = chosen[0]
    assert first.colocated
    assert first.target.ranks == count
    assert first.source.fsdp == max(count, 4 if count == 1 else count)
    for run in chosen:
        assert run.device == "cuda"
        assert len(run.engine_gpus) == run.target.ranks
        assert max((*run.trainer_gpus, *run.engine_gpus)) < count
    apart = [run for run in chosen if not set(run.trainer_gpus) & set(run.engine_gpus)]
    assert bool(apart) == (count > 1)
    assert {"experts", "mishaps"} <= {run.name.partition(":")[0] for run in chosen}


def test_three_gpus_give_an_engine_of_two_ranks() -> None:
    assert runs(gpus(3), Wanted())[0].target == Target(tp=2)


def test_what_is_asked_for_comes_first_with_its_routes() -> None:
    wanted = Wanted(source=Source(fsdp=4), target=Target(tp=4, ep=4), model="qwen3-moe", routes=("p2p",))
    asked, mishaps = runs(gpus(8), wanted)
    assert (asked.source, asked.target, asked.model, asked.routes) == (
        *((wanted.source, wanted.target)),
        "qwen3-moe",
        ("p2p",),
    )
    assert (asked.trainer_gpus, asked.engine_gpus) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mishaps.parts == ("mishaps",)


def test_too_many_ranks_are_refused_with_a_layout_that_fits() -> None:
    host = msgspec.structs.replace(SMALL_HOST, memory_bytes=needed_bytes(Source(fsdp=4), Target(tp=8)))
    with pytest.raises(Unsupported, match=r"--source fsdp=4 --target tp=16 needs about .* GiB .*--target tp=8 fits"):
        runs(host, Wanted(source=Source(fsdp=4), target=Target(tp=16)))
    with pytest.raises(Unsupported, match="needs 8 GPUs, and this host has 4"):
        runs(gpus(4), Wanted(target=Target(tp=8)))
    with pytest.raises(Unsupported, match=r"0\.0 GiB of memory available"):
        runs(msgspec.structs.replace(SMALL_HOST, memory_bytes=1024), Wanted())


def test_layouts_are_read_as_they_are_written() -> None:
    for text in ("replicas=2,fsdp=4", "fsdp=4,tp=2", "tp=8"):
        assert str(parsed(text, Source, "--source")) == text
    assert parsed("hsdp=2x4,tp=2", Source, "--source") == Source(replicas=2, fsdp=4, tp=2)
    for text in ("tp=8,ep=4,dp=2", "tp=1,pp=2"):
        assert str(parsed(text, StagedTarget, "--target")) == text
    assert parsed("tp=8,ep=4,dp=2", Target, "--target") == Target(tp=8, ep=4, dp=2)
    assert Target(tp=8, dp=2).arguments["enable_dp_attention"]


@pytest.mark.parametrize(
    ("distance", "why"),
    [
        (Distance(0.0, 0, 0), "said nothing"),
        (Distance(0.002, 48, 48), "differs by 0.002"),
        (Distance(float("nan"), 48, 48), "differs by nan"),
        (Distance(0.0001, 47, 48), "47 of 48 tokens"),
        (Distance(0.0001, 48, 48), ""),
    ],
)
def test_other_words_than_those_of_transformers_are_wrong(distance: Distance, why: str) -> None:
    assert why in distance.wrong("float32")
    assert bool(distance.wrong("float32")) == bool(why)


def warm(route: str, seconds: float, auto: bool = False) -> Row:
    return Row("run", f"warm update, {'auto' if auto else route}", True, route, 10**9, seconds, 0.01, 1.0)


def test_the_table_names_what_is_wrong_and_how_much_faster_an_update_is() -> None:
    rows = [warm("ipc", 0.02, auto=True), Row("run", "every tensor", False, why="engine rank 1: w")]
    out = io.StringIO()
    print_result(Console(file=out, width=150), rows, ["set nothing"])
    for said in ("50.0 faster", "WRONG engine rank 1: w", "set nothing", "1 of 2 steps are wrong"):
        assert said in out.getvalue()


def test_a_run_in_which_no_step_was_judged_is_not_right() -> None:
    left_out = Row("run", "first update", why="left out: the time was up")
    assert not all_right([])
    assert not all_right([left_out])
    assert all_right([left_out, warm("ipc", 0.02)])


def test_a_faster_route_than_the_chosen_one_is_named() -> None:
    told = advice(gpus(1), [warm("ipc", 0.02, auto=True), warm("p2p", 0.01)])
    assert 'transport="p2p" was faster: 10.0 ms' in told[1]
    assert len(advice(gpus(1), [warm("ipc", 0.02, auto=True), warm("p2p", 0.019)])) == 1


def ppo(correlation: float = 0.999, memory: float = 2.0) -> dict[str, float]:
    return {"training/rollout_actor_probs_pearson_corr": correlation, "perf/max_memory_allocated_gb": memory,
            "timing_s/update_weights": 0.5}  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([ppo(), ppo(), ppo()], ""),
        ([ppo(), ppo()], "2 of 3 steps ended"),
        ([ppo(), ppo(0.7), ppo()], "in step 2 the rollout's probabilities have a correlation of 0.700"),
        ([ppo(), {}, ppo()], "correlation of 0.000"),
        ([ppo(memory=1), ppo(), ppo(memory=2.1)], "the peak memory grows"),
        ([], "0 of 3 steps ended"),
    ],
)
def test_a_run_of_verl_is_right_while_probabilities_agree_and_memory_is_flat(
    steps: list[dict[str, float]], why: str
) -> None:
    row = judged("verl", "3 steps", steps)
    assert row.right == (not why)
    assert why in row.why


def test_events_arrive_in_order_and_half_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "events"
    reader, writer = EventReader(path), EventWriter(path)
    assert reader.new() == []
    with writer.phase("work", 3.0) as notes:
        notes.append("done")
    begun, ended = reader.new()
    assert begun == Started("work", 3.0)
    assert isinstance(ended, Finished)
    assert ended.note == "done"
    line = msgspec.json.encode(warm("ipc", 0.5)) + b"\n"
    with path.open("ab", buffering=0) as f:
        f.write(line[:20])
        assert reader.new() == []
        f.write(line[20:])
    assert reader.new() == [warm("ipc", 0.5)]


@pytest.mark.parametrize("source_tp", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("target_tp", [1, 2, 3, 4, 6, 8, 16, 32])
def test_heads_suit_both_sides(source_tp: int, target_tp: int) -> None:
    heads, kv_heads = tiny_model.head_counts(source_tp, target_tp)
    assert kv_heads % source_tp == kv_heads % target_tp == 0
    assert heads % kv_heads == 0
    assert kv_heads >= 8


def test_a_server_finds_another_port_10_000_above_its_own() -> None:
    """SGLang takes it for gRPC, and ends at once if there is no such port."""
    assert all(children.free_port() + 10_000 <= 65_535 for _ in range(100))


def test_a_failing_child_shows_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('what went wrong'); sys.exit(3)"]
    with pytest.raises(ReshardError, match=r"(?s)exit status 3.*what went wrong"):
        children.run(command, dict(os.environ), tmp_path / "log", time.monotonic() + 30, lambda: None)


def test_the_deadline_ends_grandchildren_in_sessions_of_their_own(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(DeadlineExceeded, match="the deadline passed"):
        children.run(
            [sys.executable, "-c", script],
            dict(os.environ),
            tmp_path / "log",
            time.monotonic() + 5,
            lambda: None,
        )
    grandchild = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    raise AssertionError("the grandchild outlived the deadline")


def test_shared_memory_of_a_grandchild_that_was_killed_earlier_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_CENSUS_EVERY_S", 0.0)
    holder = (
        "from multiprocessing import resource_tracker, shared_memory\n"
        "resource_tracker.register = lambda *_: None\n"  # as if its tracker had been killed too
        "held = shared_memory.SharedMemory(create=True, size=4096)\n"
        "print(held.name, flush=True)\n"
        "input()\n"
    )
    script = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {holder!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        f"open({str(tmp_path / 'partial')!r}, 'wb').write(child.stdout.readline())\n"
        f"os.rename({str(tmp_path / 'partial')!r}, {str(tmp_path / 'name')!r})\n"
        f"open({str(tmp_path / 'seen')!r}).read()\n"  # until it has been looked at: a pipe
        "child.kill()\n"
        "child.wait()\n"
    )
    os.mkfifo(tmp_path / "seen")
    looks = 0

    def poll() -> None:  # called after each census
        nonlocal looks
        if (tmp_path / "name").exists():
            looks += 1
            if looks == 2:
                (tmp_path / "seen").write_text("go on")

    children.run([sys.executable, "-c", script], dict(os.environ), tmp_path / "log", time.monotonic() + 30, poll)
    assert looks >= 2
    assert not (Path("/dev/shm") / (tmp_path / "name").read_text().strip()).exists()
