"""Starts the runs of a self-test, shows what they do, ends them, and gives the verdict."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.selftest import children, mishaps, models, verl_steps
from sglang_reshard.selftest.choice import MISHAPS, Wanted, runs
from sglang_reshard.selftest.environment import environment
from sglang_reshard.selftest.events import EventReader, Row
from sglang_reshard.selftest.host import Host
from sglang_reshard.selftest.job import Job, Run
from sglang_reshard.selftest.progress import Progress
from sglang_reshard.selftest.table import all_right, conclude

_OVERTIME_S = 180.0  # for what is under way when the time is up


def selftest(wanted: Wanted, minutes: float) -> int:
    """Returns the exit status: 0 when everything was right. Results go to stdout, progress and errors to stderr.

    Raises Unsupported for layouts that do not fit on this host, and where SGLang is not installed.
    """
    host = Host.here()
    chosen = runs(host, wanted)
    models.check(wanted.model)
    _check_installed("engine")
    ends_at = time.time() + minutes * 60

    def take(rows: list[Row], logs: Path, shown: Console) -> None:
        for run in chosen:
            if time.time() + run.usual_s > ends_at and rows:
                rows.append(Row(run.name, "left out", why=f"it takes about {run.usual_s:.0f} s: raise --minutes"))
            else:
                rows += _rows(run, logs, ends_at, shown)

    return _judged(host, take)


def selftest_of_verl(minutes: float) -> int:
    """Returns the exit status of `verl_steps`. Raises Unsupported where verl or SGLang is not installed."""
    _check_installed("engine,verl", "verl")
    host, deadline = Host.here(), time.monotonic() + minutes * 60

    def take(rows: list[Row], logs: Path, shown: Console) -> None:
        tell = partial(shown.print, highlight=False, soft_wrap=True)

        def seen(row: Row) -> None:
            rows.append(row)
            tell(f"{row.run}, {row.step}: {row.why or 'right'}")

        # A short name: Ray puts sockets there, whose paths may not be long.
        with tempfile.TemporaryDirectory(prefix="verl-", ignore_cleanup_errors=True) as folder:
            verl_steps.take(host, Path(folder), logs / "verl.log", deadline, seen, tell)

    return _judged(host, take)


def _judged(host: Host, take: Callable[[list[Row], Path, Console], None]) -> int:
    """Takes steps, which append rows, and prints the verdict. Returns the exit status."""
    shown, begin = Console(stderr=True), time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="sglang-reshard-selftest-"))
    rows: list[Row] = []
    try:
        with children.sigterm_as_interrupt():
            take(rows, logs, shown)
    except KeyboardInterrupt:
        shown.print(f"Stopped; all processes of the self-test are ended. Their logs are in {logs}.", soft_wrap=True)
        return 130
    if all_right(rows):
        shutil.rmtree(logs, ignore_errors=True)
    else:
        shown.print(f"The logs are in {logs}; they contain no key. Attach them to a bug report.", soft_wrap=True)
    return conclude(host, rows, time.monotonic() - begin)


def _rows(run: Run, logs: Path, ends_at: float, shown: Console) -> list[Row]:
    """Runs one of them, and returns what was seen."""
    found: list[Row] = []
    log = logs / f"{run.name.partition(':')[0].replace(' ', '-')}.log"
    log.touch()
    folder = Path(tempfile.mkdtemp(prefix="sglang-reshard-run-"))
    events = folder / "events"
    reader = EventReader(events)
    shown.print(f"{run.name}, {run.model}, {run.dtype}: about {run.usual_s:.0f} s", highlight=False)
    try:
        with Progress(shown) as progress:

            def poll() -> None:
                for event in reader.new():
                    progress.show(event)
                    if isinstance(event, Row):
                        found.append(event)
                progress.tick()

            variables = environment(folder, run.target.ranks, run.device, *_model_types(run))
            job = Job(run, str(folder), str(events), ends_at)
            deadline = time.monotonic() + max(ends_at - time.time(), 0) + _OVERTIME_S
            if run.parts == MISHAPS:
                mishaps.take(job, variables, log, deadline, poll)
            else:
                children.run_ranks(
                    run.source.ranks, "sglang_reshard.selftest.rank", job, variables, log, deadline, poll
                )
            poll()
    except ReshardError as error:
        shown.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        found.append(Row(run.name, "the run ended early", False, why=str(error).splitlines()[0]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _check_installed(extras: str, *others: str) -> None:
    missing = [name for name in (*others, "sglang", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise Unsupported(f"{' and '.join(missing)} not installed: pip install 'sglang-reshard[{extras}]'")


def _model_types(run: Run) -> tuple[str, ...]:
    """The modules of SGLang's models that a run needs; all for a model that a user brings."""
    return ("qwen3", "qwen3_moe") if run.model in models.NAMES else ()
