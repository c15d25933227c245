"""Runs `sglang-reshard plan`: shows progress, then prints the result as a table or JSON and draws it."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_reshard.cli.outcome import DONE, REFUSED
from sglang_reshard.cli.plan import worker_process
from sglang_reshard.cli.plan.figures import Forecast
from sglang_reshard.cli.plan.models import CONFIG, prepare
from sglang_reshard.cli.plan.request import PlanRequest, Source, Target
from sglang_reshard.cli.plan.sizes import check_stages
from sglang_reshard.cli.plan.table import print_forecast
from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.nearest import nearest


@dataclass(frozen=True, slots=True)
class Output:
    """The format of the result: a table or JSON on stdout, and a plot in the file `plot`."""

    as_json: bool
    plot: Path | None


def run(model: str, source: str, target: str, options: dict[str, Any], output: Output) -> int:
    """Prints the plan and returns the exit code. `options` are the other fields of `PlanRequest`, except `folder`.

    Raises Mismatch, or an error of `make_plan`, if no plan can be made.
    """
    if output.plot is not None:
        _check_plotting(output.plot)
    with tempfile.TemporaryDirectory(prefix="sglang-reshard-plan-") as folder:
        sides: dict[str, Any] = {"source": Source.parse(source), "target": Target.parse(target)}
        found = prepare(model, options["layers"], Path(folder))
        check_stages(json.loads((found / CONFIG).read_text()), sides["target"], model)
        request = PlanRequest(model=model, folder=str(found.resolve()), **sides, **options)
        forecast = make_plan(request, Console(stderr=True))
        # The temporary folder is gone by the time anybody reads this.
        forecast = msgspec.structs.replace(forecast, question=msgspec.structs.replace(request, folder=model))
    if output.as_json:
        print(msgspec.json.format(msgspec.json.encode(forecast), indent=1).decode())
    else:
        print_forecast(Console(), forecast)
    if output.plot is not None and not forecast.refused:
        from sglang_reshard.cli.plan.plot import draw

        draw(forecast, output.plot)
    return REFUSED if forecast.refused else DONE


def make_plan(request: PlanRequest, console: Console) -> Forecast:
    """Makes the plan in a worker process and shows its progress on the console.

    Raises Mismatch or Unsupported for a request that cannot be planned, ChildFailed when the worker fails, and
    DeadlineExceeded when it takes longer than the request allows. Raises Unsupported without SGLang.
    """
    if importlib.util.find_spec("sglang") is None:
        raise Unsupported(
            "plan builds SGLang's own models, and SGLang is not installed here; run: pip install "
            "'sglang-reshard[engine]'"
        )
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task, begun = None, dict[str, float]()
        for report in _reports(request):
            if "error" in report:
                raise Mismatch(report["error"])
            if "forecast" in report:
                ends = [*begun.values(), time.perf_counter()][1:]
                seconds = {step: round(end - begin, 3) for (step, begin), end in zip(begun.items(), ends, strict=True)}
                return msgspec.convert(report["forecast"] | {"seconds_by_step": seconds}, Forecast)
            if "step" in report:
                begun[report["step"]] = time.perf_counter()
                if task is not None:
                    progress.update(task, completed=progress.tasks[task].total)
                task = progress.add_task(report["step"], total=report["of"])
            elif task is not None:
                progress.advance(task, report["done"])
    raise Mismatch("the worker process ended without a result; this is a bug, please report it")


def _reports(request: PlanRequest) -> Iterator[dict[str, Any]]:
    # Hide GPUs: models are built without memory, and forked children could not use CUDA.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    yield from worker_process.run(
        "sglang_reshard.cli.plan.work",
        "serve",
        msgspec.to_builtins(request),
        what=f"The plan of {request.model}",
        environment=environment,
        deadline_seconds=request.deadline_seconds,
    )


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
