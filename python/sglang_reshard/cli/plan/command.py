"""What the command line runs: the work with its progress, then the answer as a table, as JSON, as a picture."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_reshard.cli.plan.figures import Forecast
from sglang_reshard.cli.plan.models import prepare
from sglang_reshard.cli.plan.request import PlanRequest, Source, Target
from sglang_reshard.cli.plan.table import print_forecast
from sglang_reshard.errors import Mismatch, ReshardError

REFUSED, WRONG = 1, 2  # exit codes: the update would be refused; there is no answer


@dataclass(frozen=True, slots=True)
class Output:
    """What becomes of the answer: printed as a table or as JSON, and drawn into a file."""

    as_json: bool
    plot: Path | None


def run(model: str, source: str, target: str, options: dict[str, Any], output: Output) -> int:
    """Answer, and return the exit code. `options` are the other fields of a `PlanRequest`, but for its folder."""
    messages = Console(stderr=True)
    try:
        if output.plot is not None:
            _check_plotting(output.plot)
        with tempfile.TemporaryDirectory(prefix="sglang-reshard-plan-") as folder:
            sides: dict[str, Any] = {"source": Source.parse(source), "target": Target.parse(target)}
            found = prepare(model, options["layers"], Path(folder))
            question = PlanRequest(model=model, folder=str(found.resolve()), **sides, **options)
            forecast = ask(question, messages)
            # Of the folder that was made for it nothing is left.
            forecast = msgspec.structs.replace(forecast, question=msgspec.structs.replace(question, folder=model))
    except ReshardError as error:
        messages.print(f"[bold red]error[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return WRONG
    if output.as_json:
        print(msgspec.json.format(msgspec.json.encode(forecast), indent=1).decode())
    else:
        print_forecast(Console(), forecast)
    if output.plot is not None and not forecast.refused:
        from sglang_reshard.cli.plan.plot import draw

        draw(forecast, output.plot)
    return REFUSED if forecast.refused else 0


def ask(question: PlanRequest, console: Console) -> Forecast:
    """The answer, from a fresh process that shows its progress on the console.

    Raises Mismatch and Unsupported for a question without an answer, ChildFailed and DeadlineExceeded for work that
    failed or took longer than the question allows.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = None
        for said in _answers(question):
            if "error" in said:
                raise Mismatch(said["error"])
            if "forecast" in said:
                return msgspec.convert(said["forecast"], Forecast)
            if "step" in said:
                if task is not None:
                    progress.update(task, completed=progress.tasks[task].total)
                task = progress.add_task(said["step"], total=said["of"])
            elif task is not None:
                progress.advance(task, said["done"])
    raise Mismatch("the work ended without an answer; this is a bug, please report it")


def _answers(question: PlanRequest) -> Iterator[dict[str, Any]]:
    try:
        from sglang_reshard.cli.plan import worker_process
    except ImportError as error:
        raise Mismatch(f"{error}: a plan builds SGLang's own models; pip install 'sglang-reshard[engine]'") from None
    # No GPU, also where there is one: models are built without memory, and forks could not use it.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    yield from worker_process.answers(
        "sglang_reshard.cli.plan.work",
        "serve",
        msgspec.to_builtins(question),
        what=f"The plan of {question.model}",
        environment=environment,
        deadline_seconds=question.deadline_seconds,
    )


def _check_plotting(path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Mismatch("--plot draws with matplotlib, which is missing; pip install 'sglang-reshard[bench]'") from None
    if not path.parent.is_dir():
        raise Mismatch(f"--plot {path}: there is no folder {path.parent}")
