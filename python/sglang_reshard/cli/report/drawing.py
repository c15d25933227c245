"""Draws a timeline of ranks, and bytes between ranks, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sglang_reshard.cli.report.timeline import Span
from sglang_reshard.observability.report import RankReport, format_bytes

WIDTH, LABELS = 960, 130
MOST_RANKS = 48  # of a side, that are drawn one by one
_ROW, _BAR, _CELL = 22, 16, 28
_COLOURS = 8  # classes c0 to c7 of the page's style sheet


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
    parts += [_label(rank, number) for rank, number in rows.items()]
    for span in found:
        if span.rank in rows:
            at = LABELS + span.begin * scale, rows[span.rank] * _ROW + (_ROW - _BAR) / 2
            says = f"{span.rank}, {span.phase}: {span.seconds * 1e3:.2f} ms from {span.begin * 1e3:.2f} ms"
            parts.append(_rectangle(at, (max(0.5, span.seconds * scale), _BAR), f"c{colours[span.phase]}", says))
    parts += _axis(total, scale, len(rows) * _ROW + 14)
    return "\n".join([*parts, "</svg>"])


def phases(found: Sequence[Span]) -> dict[str, int]:
    """Returns phase -> number of its colour."""
    return {phase: number % _COLOURS for number, phase in enumerate(dict.fromkeys(span.phase for span in found))}


def _label(rank: str, number: int) -> str:
    return f'<text x="{LABELS - 8}" y="{number * _ROW + 15}" text-anchor="end">{escape(rank)}</text>'


def _axis(total: float, scale: float, y: int) -> list[str]:
    """Times at five places."""
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
