"""Starts the demo's processes, shows what they do, ends them, and says what was proved."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console

from benchmark.demo import children, host, memory
from benchmark.demo.events import TRAINER_START, EventReader, EventWriter, Finished, Started, Updated
from benchmark.demo.expected import Question, read_answer
from benchmark.demo.model_modules import DISABLED_VARIABLE, unneeded_modules
from benchmark.demo.progress import Progress
from benchmark.demo.settings import Settings
from benchmark.demo.table import print_result
from benchmark.demo.verdict import Expected, judge, summary
from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.testing import cpu_host


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
        with _sigterm_as_interrupt():
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
    environment = _environment(settings)

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
        children.run(_torchrun(settings), environment, log, deadline, poll)
        question = Question(
            model=str(Path(settings.folder) / "model"),
            checkpoints={dtype: [u.checkpoint for u in updates if u.dtype == dtype] for dtype in settings.dtypes},
            target_tp=settings.target_tp,
            events=settings.events,
            answer=str(Path(settings.folder) / "expected"),
        )
        command = [sys.executable, "-m", "benchmark.demo.expected", msgspec.json.encode(question).decode()]
        children.run(command, environment, log, deadline, poll)
    return updates, read_answer(question), seconds


def _torchrun(settings: Settings) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",  # a free port of its own choice
        f"--nproc-per-node={settings.source_tp}",
        "-m",
        "benchmark.demo.rank",
        msgspec.json.encode(settings).decode(),
    ]


def _environment(settings: Settings) -> dict[str, str]:
    temporary = Path(settings.folder) / "tmp"
    temporary.mkdir()
    environment = {
        **os.environ,
        # torchrun, torch and wandb leave folders behind there; they go with ours.
        "TMPDIR": str(temporary),
        # Nothing here is on a hub, and asking one takes its time where there is no network.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        DISABLED_VARIABLE: ",".join(unneeded_modules("qwen3")),
    }
    if settings.device == "cpu":
        # A host with fewer GPUs than ranks runs the demo as one without any.
        environment |= {**cpu_host.environment(settings.target_tp), "CUDA_VISIBLE_DEVICES": ""}
    # Its processes import `benchmark` and `tools` from the checkout, wherever the demo was started from.
    paths = [environment.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return environment


def _device(settings: Settings) -> str:
    import torch

    enough = torch.cuda.device_count() >= max(settings.source_tp, settings.target_tp)
    return "cuda" if torch.cuda.is_available() and enough else "cpu"


def _check_memory(settings: Settings) -> None:
    complaint = memory.complaint(settings.source_tp, settings.target_tp, memory.available_bytes())
    if complaint:
        raise Unsupported(complaint)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """So that being told to end ends the children too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
