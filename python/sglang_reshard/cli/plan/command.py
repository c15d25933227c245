"""Runs `sglang-reshard plan`: shows progress, then prints the result as a table or JSON and draws it."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_reshard.cli.layouts import Source, StagedTarget, parsed
from sglang_reshard.cli.outcome import DONE, REFUSED
from sglang_reshard.cli.plan import worker_process
from sglang_reshard.cli.plan.checkpoint import CONFIG, prepare
from sglang_reshard.cli.plan.figures import Forecast
from sglang_reshard.cli.plan.request import PlanRequest, check_stages
from sglang_reshard.cli.plan.table import draw, print_forecast
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.nearest import nearest


def run(model: str, source: str, target: str, *, as_json: bool, plot: Path | None, **options: Any) -> int:
    """Prints the plan and returns the exit code.

    as_json  print JSON instead of tables
    plot     file for a picture
    options  the other fields of `PlanRequest`, except `folder`

    Raises Mismatch, or an error of `make_plan`, if no plan can be made.
    """
    if plot is not None:
        _check_plotting(plot)
    with tempfile.TemporaryDirectory(prefix="sglang-reshard-plan-") as folder:
        trainer, engine = parsed(source, Source, "--source"), parsed(target, StagedTarget, "--target")
        found = prepare(model, options["layers"], Path(folder))
        check_stages(json.loads((found / CONFIG).read_text()), engine, model)
        request = PlanRequest(model=model, folder=str(found.resolve()), source=trainer, target=engine, **options)
        forecast = make_plan(request, Console(stderr=True))
        # The temporary folder is gone by the time anybody reads this.
        forecast = msgspec.structs.replace(forecast, question=msgspec.structs.replace(request, folder=model))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(forecast), indent=1).decode())
    else:
        print_forecast(Console(), forecast)
    if plot is not None and not forecast.refused:
        draw(forecast, plot)
    return REFUSED if forecast.refused else DONE


def make_plan(request: PlanRequest, console: Console) -> Forecast:
    """Makes the plan in a worker process and shows its progress on the console.

    Raises Mismatch for a request that cannot be planned, ChildFailed when the worker fails, and DeadlineExceeded when
    it takes longer than the request allows. Raises Unsupported without SGLang.
    """
    if importlib.util.find_spec("sglang") is None:
        raise Unsupported(
            "plan builds SGLang's own models, and SGLang is not installed here; run: pip install "
            "'sglang-reshard[engine]'"
        )
    # Hide GPUs: models are built without memory, and forked children could not use CUDA.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    reports = worker_process.run(
        "sglang_reshard.cli.plan.work",
        "serve",
        msgspec.to_builtins(request),
        what=f"The plan of {request.model}",
        environment=environment,
        deadline_seconds=request.deadline_seconds,
    )
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = None
        for report in reports:
            if "forecast" in report:
                seconds = {step.description: round(step.elapsed or 0.0, 3) for step in progress.tasks}
                return msgspec.convert(report["forecast"] | {"seconds_by_step": seconds}, Forecast)
            if "step" in report:
                if not console.is_terminal:
                    console.print(f"{report['step']} ...")
                if task is not None:
                    progress.update(task, completed=progress.tasks[task].total)
                    progress.stop_task(task)
                task = progress.add_task(report["step"], total=report["of"])
            elif task is not None:
                progress.advance(task, report["done"])
    raise Mismatch("the worker process ended without a result; this is a bug, please report it")


def _check_plotting(path: Path) -> None:
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise Unsupported("--plot needs matplotlib; run: pip install 'sglang-reshard[bench]'") from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if (ending := path.suffix.removeprefix(".").lower()) not in known:
        raise Mismatch(f"--plot {path}: the file's ending must be one of: {', '.join(known)}{nearest(ending, known)}")
    if not path.parent.is_dir():
        raise Mismatch(f"--plot {path}: the folder {path.parent} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Mismatch(f"--plot {path}: the file cannot be written")
