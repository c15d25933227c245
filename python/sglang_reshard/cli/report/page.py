"""Writes a report as one HTML page that needs no other file and runs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from sglang_reshard.cli.report.timeline import Span, spans
from sglang_reshard.observability.report import RankReport, UpdateReport, format_bytes, overview
from sglang_reshard.shown_names import some_names

_STYLE = """
:root { color-scheme: light dark; --text: #1d2733; --faint: #5c6b7a; --line: #d5dce3; --back: #fff; --cell: #0b62c4; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4eaf0; --faint: #93a1b0; --line: #35424f; --back: #12181f; --cell: #5cabff; }
}
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--back); color: var(--text);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.timeline { min-width: 40rem; } svg { max-width: 100%; height: auto; font-size: 12px; } svg text { fill: var(--text); }
svg text.faint, p.faint { fill: var(--faint); color: var(--faint); }
.cell { fill: var(--cell); stroke: var(--line); }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr { border-bottom: 1px solid var(--line); }
.scroll { overflow-x: auto; } .key span { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 1rem; }
"""
# Colours that differ for people who do not tell red from green (Okabe and Ito).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a200", "#7a7a7a")
WIDTH, LABELS = 960, 130
MOST_RANKS = 48  # of a side, that are drawn one by one
_ROW, _BAR, _CELL = 22, 16, 28


def page(report: UpdateReport) -> str:
    """Returns the page: the choice, a timeline by rank and phase, bytes by pair of ranks, memory."""
    title = f"Update to version {report.weight_version}" if report.weight_version is not None else "Update"
    colours = "\n".join(
        f".c{number} {{ fill: {colour}; background: {colour}; }}" for number, colour in enumerate(_COLOURS)
    )
    body = [f"<h1>{escape(title)}</h1>", _table((), _overview(report)), *_timeline(report), *_pairs(report)]
    body += ["<h2>Engine ranks</h2>", *_engine_ranks(report.engine_ranks)]
    if report.trainer_ranks:
        rows = [(r.rank, format_bytes(r.shard_bytes), format_bytes(r.sent_bytes)) for r in report.trainer_ranks]
        heads = "trainer rank", "holds", "sent, or read from its memory"
        body += ["<h2>Trainer ranks</h2>", _scrolling(_table(heads, rows))]
    head = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}{colours}</style></head>'
    )
    return "\n".join([head, "<body>", *body, "</body></html>", ""])


def _overview(report: UpdateReport) -> list[tuple[str, str]]:
    rows = [
        ("outcome", "all engine ranks have the weights" if report.success else "failed"),
        ("seconds", f"{report.seconds.get('total', 0.0):.4f}"),
        *overview(report),
    ]
    if report.kept:
        rows.append(("kept", f"{len(report.kept)} parameters: {some_names(report.kept)}"))
    return rows


def _timeline(report: UpdateReport) -> list[str]:
    found = spans(report)
    if not found:
        return []
    key = "".join(f'<span class="c{number}"></span>{escape(phase)}' for phase, number in phases(found).items())
    note = "A report has durations. The phases of an engine rank are drawn after each other, from the end of publish."
    if len(report.engine_ranks) >= MOST_RANKS:
        note += f" The {MOST_RANKS} slowest ranks are drawn."
    drawn = _scrolling(f'<div class="timeline">{timeline(found)}</div>')
    return ["<h2>Timeline</h2>", drawn, f'<p class="key">{key}</p>', f'<p class="faint">{note}</p>']


def _pairs(report: UpdateReport) -> list[str]:
    trainers = max((trainer + 1 for rank in report.engine_ranks for trainer in rank.read_bytes), default=0)
    if not trainers:
        why = "The report has no bytes by pair of ranks: only that of trainer rank 0 has them."
        return ["<h2>Bytes between ranks</h2>", f'<p class="faint">{why}</p>']
    drawn = pairs(report.engine_ranks, max(trainers, len(report.trainer_ranks)))
    note = "Columns are trainer ranks. Move the pointer over a square for its bytes."
    return ["<h2>Bytes between ranks</h2>", _scrolling(drawn), f'<p class="faint">{note}</p>']


def _engine_ranks(ranks: Sequence[RankReport]) -> list[str]:
    heads = "engine rank", "received", "least possible", "peak extra memory", "staged", "outside of torch", "seconds"
    rows = [
        (
            rank.rank,
            *map(format_bytes, (rank.received_bytes, rank.least_bytes, rank.peak_extra_bytes)),
            *map(format_bytes, (rank.staged_bytes, rank.foreign_bytes)),
            f"{sum(rank.seconds.values()):.4f}",
        )
        for rank in ranks
    ]
    return [_scrolling(_table(heads, rows))]


def _scrolling(content: str) -> str:
    return f'<div class="scroll">{content}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table. Below heads, all columns but the first one are numbers."""
    numbers = bool(heads)
    lines = [_row("td", row, numbers) for row in rows]
    return f"<table>{''.join([_row('th', heads, numbers), *lines] if heads else lines)}</table>"


def _row(tag: str, cells: Sequence[object], numbers: bool) -> str:
    kinds = [' class="number"' if numbers and column else "" for column in range(len(cells))]
    found = (f"<{tag}{kind}>{escape(str(cell))}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
    return f"<tr>{''.join(found)}</tr>"


def timeline(found: Sequence[Span]) -> str:
    """A row for each rank, and a bar for each phase, as wide as it lasts. Of many engine ranks the slowest ones."""
    ends = dict[str, float]()
    for span in found:
        ends[span.rank] = max(ends.get(span.rank, 0.0), span.end)
    kept = set(sorted(ends, key=lambda rank: ends[rank], reverse=True)[:MOST_RANKS])
    rows = {rank: number for number, rank in enumerate(rank for rank in ends if rank in kept)}
    total, colours = max(ends.values(), default=0.0) or 1.0, phases(found)
    scale = (WIDTH - LABELS) / total
    height = _ROW * (len(rows) + 1)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="seconds by rank and phase">']
    for rank, number in rows.items():
        parts.append(f'<text x="{LABELS - 8}" y="{number * _ROW + 15}" text-anchor="end">{escape(rank)}</text>')
    for span in found:
        if span.rank in rows:
            at = LABELS + span.begin * scale, rows[span.rank] * _ROW + (_ROW - _BAR) / 2
            says = f"{span.rank}, {span.phase}: {span.seconds * 1e3:.2f} ms from {span.begin * 1e3:.2f} ms"
            parts.append(_rectangle(at, (max(0.5, span.seconds * scale), _BAR), f"c{colours[span.phase]}", says))
    parts += _axis(total, scale, len(rows) * _ROW + 14)
    return "\n".join([*parts, "</svg>"])


def phases(found: Sequence[Span]) -> dict[str, int]:
    """Returns phase -> number of its colour."""
    return {phase: number % len(_COLOURS) for number, phase in enumerate(dict.fromkeys(span.phase for span in found))}


def _axis(total: float, scale: float, y: int) -> list[str]:
    steps = [total * i / 4 for i in range(5)]
    anchors = ("start", "middle", "middle", "middle", "end")
    return [
        f'<text class="faint" x="{LABELS + s * scale:.1f}" y="{y}" text-anchor="{anchor}">{s * 1e3:.3g} ms</text>'
        for s, anchor in zip(steps, anchors, strict=True)
    ]


def pairs(ranks: Sequence[RankReport], trainer_ranks: int) -> str:
    """A square for each pair of an engine rank (row) and a trainer rank (column), darker for more bytes.

    Neighbours share a square where a side has more than `MOST_RANKS` ranks.
    """
    columns, rows = _groups(trainer_ranks), _groups(len(ranks))
    sums = [[0] * len(columns) for _ in rows]
    width = columns[0].stop if columns else 1
    for row, group in enumerate(rows):
        for rank in ranks[group.start : group.stop]:
            for trainer, nbytes in rank.read_bytes.items():
                if 0 <= trainer < trainer_ranks:
                    sums[row][trainer // width] += nbytes
    most = max((max(row) for row in sums), default=0) or 1
    size = LABELS + _CELL * len(columns), _CELL * (len(rows) + 1)
    parts = [
        f'<svg viewBox="0 0 {max(size[0], 300)} {size[1]}" width="{max(size[0], 300)}" role="img" '
        'aria-label="bytes from trainer ranks to engine ranks">'
    ]
    for column, group in enumerate(columns):
        x = LABELS + column * _CELL + _CELL / 2
        parts.append(f'<text class="faint" x="{x}" y="18" text-anchor="middle">{group.start}</text>')
    for row, group in enumerate(rows):
        numbers = [ranks[group.start].rank, ranks[group.stop - 1].rank]
        name = "engine rank " + "-".join(map(str, dict.fromkeys(numbers)))
        parts.append(f'<text x="{LABELS - 8}" y="{(row + 1) * _CELL + 18}" text-anchor="end">{name}</text>')
        for column, nbytes in enumerate(sums[row]):
            of = columns[column]
            trainers = "-".join(map(str, dict.fromkeys((of.start, of.stop - 1))))
            says = f"trainer rank {trainers} to {name}: {format_bytes(nbytes)}"
            at = LABELS + column * _CELL + 1, (row + 1) * _CELL + 1
            opacity = f' fill-opacity="{nbytes / most:.3f}"'
            parts.append(_rectangle(at, (_CELL - 2, _CELL - 2), "cell", says, opacity))
    return "\n".join([*parts, "</svg>"])


def _groups(ranks: int) -> list[range]:
    each = -(-ranks // MOST_RANKS) or 1
    return [range(begin, min(begin + each, ranks)) for begin in range(0, ranks, each)]


def _rectangle(at: tuple[float, float], size: tuple[float, float], kind: str, says: str, more: str = "") -> str:
    return (
        f'<rect class="{kind}" x="{at[0]:.2f}" y="{at[1]:.2f}" width="{size[0]:.2f}" height="{size[1]:.2f}"{more}>'
        f"<title>{escape(says)}</title></rect>"
    )
