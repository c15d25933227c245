"""The results as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmark import results
from benchmark.pages import grouped

_COLORS = {
    "ipc": "tab:blue",
    "p2p": "tab:green",
    "broadcast": "tab:orange",
    "auto": "tab:purple",
    "stock": "tab:gray",
}
_WIDTH, _HEIGHT = 3.4, 2.8  # inches of one panel


def plot_paths(rows: results.Rows, path: Path) -> None:
    """A panel for each case: median seconds of every path as bars, log scale, and the copy limit as a line."""
    for ax, of_case in _panels(path, grouped(rows, "case")):
        names = [row["path"] for row in of_case]
        seconds = [row["seconds_median"] for row in of_case]
        bars = ax.bar(names, seconds, color=[_COLORS.get(name, "black") for name in names])
        ax.bar_label(bars, [f"{s:.3g}" for s in seconds], fontsize=7)
        limit = of_case[0]["limit_seconds"]
        ax.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"copy limit {limit:.3g} s")
        ax.set_yscale("log")
        ax.set_ylim(limit / 2, max(seconds) * 3)
        size = f"{of_case[0]['tensors']:,} tensors, {of_case[0]['bytes'] / 1e6:,.0f} MB"
        ax.set_title(f"{of_case[0]['case']}\n{size}", fontsize=8)
        ax.legend(fontsize=7)


def plot_scaling(rows: results.Rows, path: Path) -> None:
    """A panel for each curve: median seconds of every transport against what is varied, both log scale."""
    for ax, of_curve in _panels(path, grouped(rows, "case")):
        key = of_curve[0]["against"]
        for name in dict.fromkeys(row["path"] for row in of_curve):
            points = sorted((row[key], row["seconds_median"]) for row in of_curve if row["path"] == name)
            ax.plot(*zip(*points, strict=True), marker=".", label=name, color=_COLORS.get(name, "black"))
        ax.set_xscale("log")
        ax.set_yscale("log")
        values = sorted({row[key] for row in of_curve})
        ax.set_xticks(values, [_short(value) for value in values])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel("engine ranks" if key == "engine_tp" else key, fontsize=8)
        ax.set_title(of_curve[0]["case"].removeprefix("scaling: "), fontsize=8)
        ax.legend(fontsize=7)


def plot_deltas(rows: results.Rows, path: Path) -> None:
    """A panel for each link: seconds of a full update by p2p to one receiver, and of deltas, as bars."""
    links = [row for row in rows if row.get("receivers") == 1 and row.get("transport") == "p2p"]
    for ax, of_rate in _panels(path, grouped(links, "rate")):
        names = ["full" if row["changed"] is None else f"{row['changed']:.0%} changed" for row in of_rate]
        bars = ax.bar(names, [row["seconds"] for row in of_rate], color=["tab:gray", "tab:green", "tab:blue"])
        labels = [f"{row['seconds']:.2g} s\n{row['received_bytes'] / 1e6:.0f} MB" for row in of_rate]
        ax.bar_label(bars, labels, fontsize=7)
        ax.set_ylim(0, 1.25 * max(row["seconds"] for row in of_rate))
        ax.set_title(f"{of_rate[0]['model_bytes'] / 1e6:.0f} MB over {of_rate[0]['rate']}", fontsize=8)


def _short(value: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= 0.95 * unit:
            return f"{value / unit:.0f}{name}"
    return str(value)


def _panels(path: Path, of_panels: list[results.Rows]) -> Iterator[tuple[Axes, results.Rows]]:
    """Yields each panel with its rows, and writes the picture when all are drawn."""
    figure = Figure(figsize=(_WIDTH * len(of_panels), _HEIGHT), layout="constrained")
    axes: Any = figure.subplots(1, len(of_panels), squeeze=False)[0]
    for ax in axes:
        ax.tick_params(which="both", labelsize=7)
    axes[0].set_ylabel("seconds per update, median", fontsize=8)
    yield from zip(axes, of_panels, strict=True)
    figure.savefig(path, dpi=120)
