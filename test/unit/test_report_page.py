"""A report as a page and as a trace: every rank, phase and byte is in it, and no text of it becomes markup."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sglang_reshard.cli.main import app
from sglang_reshard.cli.report import command, page
from sglang_reshard.cli.report.timeline import TRAINER, spans, trace
from sglang_reshard.errors import Mismatch
from sglang_reshard.observability.report import RankReport, TrainerRankReport, UpdateReport


def report(engines: int = 4, trainers: int = 4, **changes: object) -> UpdateReport:
    of = dict(
        success=True,
        message="<b>bold</b> & more",
        weight_version="</title><script>alert(1)</script>",
        transport="ipc",
        transport_reason="auto: engine ranks read memory of their own hosts",
        bucket_bytes=1 << 26,
        seconds={"publish": 0.5, "total": 3.0, "move": 2.0, "plan": 0.25},
        engine_ranks=tuple(
            RankReport(
                r, (r + 1) * 1000, 1000, 7, {"plan": 0.25, "move": 1.0 + r / 100}, read_bytes={r % trainers: r + 1}
            )
            for r in range(engines)
        ),
        trainer_ranks=tuple(TrainerRankReport(r, 500, 300) for r in range(trainers)),
    )
    return UpdateReport(**{**of, **changes})  # type: ignore[arg-type]


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
    text = page.page(report(engines))
    found = Page(text)
    assert not found.open
    assert not found.seen & {"script", "b", "link", "img"}
    assert "&lt;script&gt;" in text
    assert "&lt;b&gt;bold&lt;/b&gt;" in text
    assert not re.search(r"https?://", text), "the page loads nothing"


@pytest.mark.parametrize(("engines", "trainers"), [(4, 4), (100, 4), (3, 130), (97, 97)])
def test_bytes_between_ranks_add_up_also_where_neighbours_share_a_square(engines: int, trainers: int) -> None:
    of = report(engines, trainers)
    titles = Page(page.pairs(of.engine_ranks, trainers)).titles
    assert len(titles) <= page.MOST_RANKS**2
    told = sum(int(title.rsplit(": ", 1)[1].removesuffix(" B")) for title in titles if title.endswith(" B"))
    thousands = sum(float(t.rsplit(": ", 1)[1].removesuffix(" kB")) * 1000 for t in titles if t.endswith(" kB"))
    assert told + thousands == pytest.approx(
        sum(n for rank in of.engine_ranks for n in rank.read_bytes.values()), rel=0.01
    )


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
    assert (move["ts"], move["dur"]) == (750_000.0, 1_030_000.0)
    (counter,) = (e for e in events if e["ph"] == "C" and e["name"] == "bytes of engine rank 3")
    assert counter["args"] == {"received": 4000, "least": 1000, "peak extra": 7}


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
