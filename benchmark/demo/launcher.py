"""Starts the demo's processes, shows what they do, ends them, and says what was proved."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console

from benchmark.demo import children, host, memory
from benchmark.demo.events import TRAINER_START, EventReader, EventWriter, Finished, Started, Updated
from benchmark.demo.expected import Question, read_answer
from benchmark.demo.progress import Progress
from benchmark.demo.settings import Settings
from benchmark.demo.table import print_result
from benchmark.demo.verdict import Expected, judge, summary
from benchmark.environment import environment
from sglang_reshard.errors import ReshardError, Unsupported


def run(settings: Settings, deadline_s: float) -> int:
    """The exit status: 0 when everything was proved. Results go to stdout, progress and errors to stderr."""
    progress_console = Console(stderr=True)
    descriptor, log_name = tempfile.mkstemp(prefix="sglang-reshard-demo-", suffix=".log")
    os.close(descriptor)
    log = Path(log_name)
    folder = Path(tempfile.mkdtemp(prefix="sglang-reshard-demo-"))
    settings = msgspec.structs.replace(
        settings, device=_device(settings), folder=str(folder), events=str(folder / "events")
    )
    begin = time.monotonic()
    try:
        with children.sigterm_as_interrupt():
            _check_memory(settings)
            updates, expected, seconds = _work(settings, log, progress_console, begin + deadline_s)
    except KeyboardInterrupt:
        progress_console.print("Stopped; all processes of the demo are ended.", highlight=False)
        log.unlink(missing_ok=True)
        return 130
    except ReshardError as error:
        progress_console.print(f"{error}", style="red", markup=False, highlight=False, soft_wrap=True)
        if not log.stat().st_size:  # nothing was started
            log.unlink()
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)

    verdict = judge(settings, updates, expected)
    # A table is cut at the width of a terminal that is not there: give it room in a log.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    print_result(console, settings, updates, verdict)
    seconds["total"] = time.monotonic() - begin
    print(json.dumps(summary(settings, updates, verdict, seconds) | {"host": host.facts()}), flush=True)
    return 0 if verdict.ok else 1


def _work(
    settings: Settings, log: Path, console: Console, deadline: float
) -> tuple[list[Updated], Expected, dict[str, float]]:
    """What was seen, what should have been, and the seconds of each phase of the demo."""
    reader = EventReader(Path(settings.events))
    updates: list[Updated] = []
    seconds: dict[str, float] = {}
    variables = environment(Path(settings.folder), settings.target_tp, settings.device, "qwen3")

    with Progress(console) as progress:

        def poll() -> None:
            for event in reader.new():
                progress.show(event)
                match event:
                    case Updated():
                        updates.append(event)
                    case Finished(phase=phase, seconds=float(took)):
                        seconds[phase] = took
            progress.tick()

        EventWriter(Path(settings.events)).write(Started(TRAINER_START))
        ranks = children.torchrun(settings.source_tp, "benchmark.demo.rank", settings)
        children.run(ranks, variables, log, deadline, poll)
        question = Question(
            model=str(Path(settings.folder) / "model"),
            checkpoints={dtype: [u.checkpoint for u in updates if u.dtype == dtype] for dtype in settings.dtypes},
            target_tp=settings.target_tp,
            events=settings.events,
            answer=str(Path(settings.folder) / "expected"),
        )
        command = [sys.executable, "-m", "benchmark.demo.expected", msgspec.json.encode(question).decode()]
        children.run(command, variables, log, deadline, poll)
    return updates, read_answer(question), seconds


def _device(settings: Settings) -> str:
    import torch

    enough = torch.cuda.device_count() >= max(settings.source_tp, settings.target_tp)
    return "cuda" if torch.cuda.is_available() and enough else "cpu"


def _check_memory(settings: Settings) -> None:
    complaint = memory.complaint(settings.source_tp, settings.target_tp, memory.available_bytes())
    if complaint:
        raise Unsupported(complaint)
