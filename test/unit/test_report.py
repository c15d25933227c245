"""A report as text, table, JSON, page and trace: every rank, phase and byte is in it, and no text becomes markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from sglang_reshard.cli.main import app
from sglang_reshard.cli.report import command, page
from sglang_reshard.cli.report.timeline import TRAINER, spans, trace
from sglang_reshard.errors import Mismatch
from sglang_reshard.observability.report import RankReport, TrainerRankReport, UpdateReport, format_bytes


def report(trainers: int = 4, engines: int = 4, **changes: object) -> UpdateReport:
    """Engine rank r received r + 1 MB and moved for r + 1 s."""
    ranks = tuple(
        RankReport(
            r,
            (r + 1) * 10**6,
            10**6,
            2000,
            {"trace": 0.25, "move": r + 1.0},
            read_bytes={r % trainers: (r + 1) * 10**6},
        )
        for r in range(engines)
    )
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
    assert msgspec.json.decode(made.json(), type=UpdateReport) == made
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


# -- as a page and as a trace


class Page(HTMLParser):
    """What a browser makes of a page: open tags, and the titles of rectangles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.seen, self.titles = list[str](), set[str](), list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["title"] and "rect" in self.open:
            self.titles.append(data)


@pytest.mark.parametrize("engines", [1, 4, 100])
def test_the_page_is_whole_and_its_texts_are_no_markup(engines: int) -> None:
    text = page.page(
        report(engines=engines, message="<b>bold</b> & more", weight_version="</title><script>alert(1)</script>")
    )
    found = Page(text)
    assert not found.open
    assert not found.seen & {"script", "b", "link", "img"}
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert not re.search(r"https?://", text), "the page loads nothing"


@pytest.mark.parametrize(("engines", "trainers"), [(4, 4), (100, 4), (3, 130), (97, 97)])
def test_bytes_between_ranks_add_up_also_where_neighbours_share_a_square(engines: int, trainers: int) -> None:
    of = report(trainers, engines)
    titles = Page(page.pairs(of.engine_ranks, trainers)).titles
    assert len(titles) <= page.MOST_RANKS**2
    told = sum(float(title.rsplit(": ", 1)[1].removesuffix(" MB")) for title in titles if title.endswith(" MB"))
    assert told == pytest.approx(sum(n for rank in of.engine_ranks for n in rank.read_bytes.values()) / 10**6, rel=0.01)


def test_of_many_ranks_the_slowest_ones_are_drawn() -> None:
    drawn = page.timeline(spans(report(engines=200)))
    assert ">engine rank 199<" in drawn
    assert ">engine rank 0<" not in drawn
    assert drawn.count("text-anchor") == page.MOST_RANKS + 5


def test_an_update_that_failed_before_any_phase_can_be_drawn() -> None:
    failed = UpdateReport.failed("engine rank 3 did not answer", "7")
    assert "engine rank 3 did not answer" in page.page(failed)
    assert json.loads(trace(failed))["otherData"]["message"] == "engine rank 3 did not answer"


def test_the_trace_has_a_track_for_each_rank_and_its_phases_in_microseconds() -> None:
    events = json.loads(trace(report()))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == [*(f"engine rank {r}" for r in range(4)), TRAINER]
    (move,) = (e for e in events if e["ph"] == "X" and e["name"] == "move" and names[e["tid"]] == "engine rank 3")
    assert (move["ts"], move["dur"]) == (375_000.0, 4_000_000.0)
    (counter,) = (e for e in events if e["ph"] == "C" and e["name"] == "bytes of engine rank 3")
    assert counter["args"] == {"received": 4_000_000, "least": 1_000_000, "peak extra": 2000}


def test_a_file_has_one_report_or_a_line_for_each(tmp_path: Path) -> None:
    path = tmp_path / "updates.jsonl"
    path.write_text("\n".join(report(weight_version=str(n)).json() for n in (1, 2, 3)) + "\n")
    assert [command.read(path, n).weight_version for n in (0, 1, 3)] == ["3", "1", "3"]
    with pytest.raises(Mismatch, match="has 3 reports, not 4; pass --update 1 to 3"):
        command.read(path, 4)
    path.write_text(json.dumps(json.loads(report(weight_version="9").json()), indent=2))
    assert command.read(path, 0).weight_version == "9"


@pytest.mark.parametrize(("text", "why"), [("", "is empty"), ('{"success": true}', "line 1"), ("{}\nno", "line 1")])
def test_a_file_that_holds_no_report_is_refused_by_its_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "updates.jsonl"
    path.write_text(text)
    with pytest.raises(Mismatch, match=why):
        command.read(path, 0)


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "update.json"
    path.write_text(report(weight_version="7").json())
    assert app(["report", str(path), "--trace", str(tmp_path / "t.json")], standalone_mode=False) in (None, 0)
    said = capsys.readouterr().out
    assert "version 7" in said
    assert str(tmp_path / "update.html") in said
    assert Page((tmp_path / "update.html").read_text()).seen >= {"svg", "rect", "table"}
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert app(["report", str(tmp_path / "missing.json")], standalone_mode=False) == 2
