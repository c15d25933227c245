"""Draws a forecast: bytes from every trainer rank to every engine rank, and the bytes of every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_reshard.cli.plan.figures import Forecast

_GB = 1e9


def draw(forecast: Forecast, path: Path) -> None:
    """Writes the picture; the file name's extension gives its format."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    asked = forecast.question
    figure.suptitle(f"{asked.model}: {asked.source} -> {asked.target}, {forecast.transport}")
    panels = figure.subplot_mosaic([["map", "map"], ["engines", "trainers"]], height_ratios=(1.2, 1))
    _heat_map(figure, panels["map"], forecast)
    engines, trainers = panels["engines"], panels["trainers"]
    of_engines, of_trainers = forecast.engine_ranks, forecast.trainer_ranks
    _bars(engines, "engine rank", [r.received_bytes for r in of_engines], "received")
    engines.plot([r.least_bytes / _GB for r in of_engines], "k_", label="least possible")
    engines.legend()
    _bars(trainers, "trainer rank", [r.sent_bytes for r in of_trainers], "sent, or read")
    trainers.legend()
    figure.savefig(path, dpi=120)


def _heat_map(figure: Figure, axes: Axes, forecast: Forecast) -> None:
    image = axes.imshow(np.array(forecast.link_bytes).T / _GB, aspect="auto", origin="lower", cmap="viridis")
    axes.set_xlabel("trainer rank")
    axes.set_ylabel("engine rank")
    figure.colorbar(image, ax=axes, label="GB")


def _bars(axes: Axes, title: str, nbytes: list[int], label: str) -> None:
    axes.bar(range(len(nbytes)), [n / _GB for n in nbytes], label=label)
    axes.set_xlabel(title)
    axes.set_ylabel("GB")
    axes.set_ylim(bottom=0)
