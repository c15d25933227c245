"""A report as text, table and JSON, for few ranks and for many."""

from __future__ import annotations

import json

import msgspec
import pytest

from sglang_reshard.observability.report import RankReport, TrainerRankReport, UpdateReport, format_bytes


def report(trainers: int, engines: int, **changes: object) -> UpdateReport:
    """Engine rank r received r + 1 MB and moved for r + 1 s."""
    ranks = tuple(RankReport(r, (r + 1) * 10**6, 10**6, 2000, {"trace": 0.25, "move": r + 1.0}) for r in range(engines))
    made = UpdateReport(
        success=True,
        message="",
        weight_version="42",
        transport="ipc",
        transport_reason="the least seconds",
        bucket_bytes=64 * 2**20,
        seconds={"publish": 0.125, "total": 20.0, "trace": 0.25, "move": float(engines)},
        engine_ranks=ranks,
        trainer_ranks=tuple(TrainerRankReport(r, 5 * 10**9, 7) for r in range(trainers)),
    )
    return msgspec.structs.replace(made, **changes)


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the rows of the table with this title."""
    lines = text[text.index(title) :].splitlines()[1:]
    end = next((i for i, line in enumerate(lines) if line.startswith("└")), len(lines))
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines[:end] if line.startswith("│")]


def test_few_ranks_are_shown_one_by_one() -> None:
    text = str(report(2, 2))
    assert rows(text, "bytes of 2 engine ranks") == [
        ["0", "1.00 MB", "1.00 MB", "2.00 kB"],
        ["1", "2.00 MB", "1.00 MB", "2.00 kB"],
    ]
    assert rows(text, "bytes of 2 trainer ranks") == [["0", "5.00 GB", "7 B"], ["1", "5.00 GB", "7 B"]]


def test_of_many_ranks_minimum_median_and_maximum_are_shown() -> None:
    text = str(report(64, 9))
    assert [row[:2] for row in rows(text, "bytes of 9 engine ranks")] == [
        ["min", "1.00 MB"],
        ["median", "5.00 MB"],
        ["max", "9.00 MB"],
    ]
    assert len(rows(text, "bytes of 64 trainer ranks")) == 3


def test_phases_come_in_their_order_with_the_slowest_rank() -> None:
    assert rows(str(report(1, 9)), "seconds") == [
        ["publish", "", "", "0.1250", "trainer rank 0"],
        ["trace", "0.2500", "0.2500", "0.2500", "engine rank 8"],
        ["move", "1.0000", "5.0000", "9.0000", "engine rank 8"],
        ["total", "", "", "20.0000", "trainer rank 0"],
    ]


def test_what_is_said_is_no_markup_and_wide_enough() -> None:
    said = "the engine does not read [model.layers.61] " * 5
    text = str(report(1, 1, message=said, weight_version=None))
    assert "[model.layers.61]" in text
    assert "(unchanged)" in text
    assert max(map(len, text.splitlines())) <= 100


def test_json_and_dict_carry_everything_back() -> None:
    made = report(2, 3)
    assert msgspec.convert(json.loads(made.json()), UpdateReport) == made
    assert msgspec.convert(made.as_dict(), UpdateReport) == made


def test_sums_over_ranks() -> None:
    made = report(2, 4)
    assert made.received_bytes == 10 * 10**6
    assert made.bytes_per_second == pytest.approx(2.5e6)
    assert made.peak_extra_bytes == 2000
    assert made.line() == "version 42, 0.010 GB to 4 engine ranks with transport ipc in 20.000 s"


@pytest.mark.parametrize(
    ("nbytes", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1.25e9, "1.25 GB"), (3.2e15, "3200.00 TB")]
)
def test_sizes(nbytes: float, said: str) -> None:
    assert format_bytes(nbytes) == said
