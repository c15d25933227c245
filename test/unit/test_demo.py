"""The demo's own judgement: it must say no to whatever is not proved. No SGLang, no processes but tiny ones."""

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

from benchmark.demo import children, memory, tiny_model
from benchmark.demo.events import EventReader, EventWriter, Finished, Note, Started, Updated
from benchmark.demo.settings import Settings
from benchmark.demo.table import print_result
from benchmark.demo.verdict import SLACK_BYTES, Expected, judge, summary
from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.observability.report import RankReport, TrainerRankReport, UpdateReport

SETTINGS = Settings(source_tp=1, target_tp=2, dtypes=("float32", "bfloat16"), bucket_bytes=1024)


def report(version: str, **changes: object) -> UpdateReport:
    ranks = tuple(RankReport(rank, 1000, 900, 2048, {"move": 0.5}) for rank in range(2))
    made = UpdateReport(
        success=True,
        message="",
        weight_version=version,
        transport="broadcast",
        transport_reason="there is no other",
        bucket_bytes=1024,
        seconds={"total": 0.75, "move": 0.5},
        engine_ranks=ranks,
        trainer_ranks=(TrainerRankReport(0, 1000, 1000),),
    )
    return msgspec.structs.replace(made, **changes)


def update(dtype: str, version: int, **changes: object) -> Updated:
    said = [[version, version]]
    made = Updated(
        dtype=dtype,
        checkpoint=f"checkpoint-{version}",
        report=report(str(version)),
        reference=said,
        before=[[version - 1, version - 1]],
        after=said,
        lead=0.01,
        live=[{"w": f"digest {version} {rank}"} for rank in range(2)],
    )
    return msgspec.structs.replace(made, **changes)


def sound() -> list[Updated]:
    return [
        update("float32", 1, before=[[7, 7]]),
        update("float32", 2),
        update("bfloat16", 3, before=[[7, 7]]),
        update("bfloat16", 4),
    ]


def expected(updates: list[Updated]) -> Expected:
    answer: Expected = {}
    for u in updates:
        version = u.checkpoint.rsplit("-", 1)[1]
        answer.setdefault(u.dtype, {})[u.checkpoint] = [{"w": f"digest {version} {rank}"} for rank in range(2)]
    return answer


def test_a_sound_run_is_proved() -> None:
    verdict = judge(SETTINGS, sound(), expected(sound()))
    assert verdict.ok
    assert set(verdict.claims) == {
        "updated", "bit_exact", "told_apart", "unmoved", "memory_bounded", "tokens_equal", "rank_0_own_shard",
    }  # fmt: skip


def test_nothing_seen_is_nothing_proved() -> None:
    assert not judge(SETTINGS, [], {}).ok


@pytest.mark.parametrize(
    ("claim", "index", "changes"),
    [
        ("updated", 0, {"report": report("1", success=False)}),
        ("tokens_equal", 1, {"after": [[2, 9]]}),
        ("told_apart", 0, {"before": [[1, 1]]}),
        ("unmoved", 1, {"before": [[8, 8]]}),
        ("bit_exact", 2, {"live": [{"w": "digest 3 0"}, {"w": "other"}]}),
        ("bit_exact", 2, {"live": [{"w": "digest 3 0"}, {}]}),
        ("bit_exact", 2, {"live": [{"w": "digest 3 0"}, {"w": "digest 3 1", "more": "x"}]}),
        ("bit_exact", 2, {"live": [{"w": "digest 3 0"}]}),
        ("bit_exact", 2, {"live": [{}, {}]}),
        (
            "memory_bounded",
            3,
            {"report": report("4", engine_ranks=(RankReport(0, 1000, 900, 2 * 1024 + SLACK_BYTES + 1, {}),))},
        ),
        ("rank_0_own_shard", 1, {"report": report("2", engine_ranks=(RankReport(0, 1001, 900, 0, {}),))}),
    ],
)
def test_each_claim_can_fail(claim: str, index: int, changes: dict[str, object]) -> None:
    updates = sound()
    updates[index] = msgspec.structs.replace(updates[index], **changes)
    verdict = judge(SETTINGS, updates, expected(sound()))
    assert not verdict.claims[claim]
    assert not verdict.ok


def test_bfloat16_tokens_are_reported_and_not_required() -> None:
    updates = sound()
    updates[3] = msgspec.structs.replace(updates[3], after=[[4, 9]])
    verdict = judge(SETTINGS, updates, expected(sound()))
    assert verdict.ok
    line = summary(SETTINGS, updates, verdict, {"total": 1.0})
    assert line["tokens_equal"]
    assert [u["tokens_equal"] for u in line["updates"]] == [True, True, True, False]


def test_the_tables_name_what_failed() -> None:
    updates = sound()
    updates[0] = msgspec.structs.replace(updates[0], live=[{"w": "digest 1 0"}, {"w": "other"}])
    out = io.StringIO()
    print_result(Console(file=out, width=140), SETTINGS, updates, judge(SETTINGS, updates, expected(updates)))
    assert "1 of 2 differ: rank 1: w" in out.getvalue()
    assert "NO  every tensor on every engine rank" in out.getvalue()


def test_events_arrive_in_order_and_half_lines_wait(tmp_path: Path) -> None:
    path = tmp_path / "events"
    reader, writer = EventReader(path), EventWriter(path)
    assert reader.new() == []
    with writer.phase("work", 3.0) as notes:
        writer.note("on the way")
        notes.append("done")
    begun, note, ended = reader.new()
    assert begun == Started("work", 3.0)
    assert note == Note("on the way")
    assert isinstance(ended, Finished)
    assert ended.note == "done"
    line = msgspec.json.encode(update("float32", 1)) + b"\n"
    with path.open("ab", buffering=0) as f:
        f.write(line[:20])
        assert reader.new() == []
        f.write(line[20:])
    assert reader.new() == [update("float32", 1)]


def test_too_little_memory_names_the_sizes_that_fit() -> None:
    assert memory.complaint(4, 16, memory.needed_bytes(4, 16)) is None
    available = memory.needed_bytes(4, 8)
    complaint = memory.complaint(4, 16, available)
    assert complaint is not None
    assert "SOURCE_TP=4 TARGET_TP=16 needs" in complaint
    assert "These fit: SOURCE_TP=4 TARGET_TP=8" in complaint
    for source, target in memory.fitting_sizes(4, 16, available):
        assert memory.complaint(source, target, available) is None


def test_a_tiny_machine_is_told_so() -> None:
    complaint = memory.complaint(4, 16, 1024)
    assert complaint is not None
    assert "No sizes fit" in complaint


@pytest.mark.parametrize("source_tp", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("target_tp", [1, 2, 3, 4, 6, 8, 16, 32])
def test_heads_suit_both_sides(source_tp: int, target_tp: int) -> None:
    heads, kv_heads = tiny_model.head_counts(source_tp, target_tp)
    assert kv_heads % source_tp == kv_heads % target_tp == 0
    assert heads % kv_heads == 0
    assert kv_heads >= 8


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
    with pytest.raises(DeadlineExceeded, match="--deadline-s"):
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
