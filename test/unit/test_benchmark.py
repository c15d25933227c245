"""Figures of the benchmark follow from its inputs; its comparison can fail; documents have the tables of results."""

import collections
import math

import pytest
import torch

from benchmark import deepseek_v3, pages, results, rows
from benchmark.cases import STOCK, Case
from benchmark.exactness import bit_exact
from benchmark.models import Qwen3
from benchmark.timing import Timed
from benchmark.trainer import Seen
from sglang_reshard.errors import ReshardError
from sglang_reshard.observability.report import RankReport, UpdateReport
from sglang_reshard.selftest.digests import differing, digests

CASE = Case("test", Qwen3(1, 8, 8, 1, 1, 8, 8), 2, 2)
REQUIRED = {
    "case", "path", "seconds_median", "seconds_p95", "limit_seconds", "times_limit", "times_faster_than_stock",
    "bytes_received_ratio", "peak_extra_bytes", "bit_exact", "updates", "tensors", "bytes", "gb_per_s_per_rank",
}  # fmt: skip


class Live(torch.nn.Module):
    """What an engine rank may hold."""

    def __init__(self, version):
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((3, 4), float(version)))
        self.register_buffer("b", torch.arange(4) + version)


def engine(version):
    return [digests(Live(version)) for _ in range(2)]


def test_one_spoiled_tensor_on_one_rank_is_seen():
    assert bit_exact(engine(1), engine(2), engine(2))
    spoiled = Live(2)
    spoiled.a.data.view(torch.int32)[1, 2] ^= 1
    after = [digests(Live(2)), digests(spoiled)]
    assert not bit_exact(engine(1), after, engine(2))
    assert differing(after, engine(2)) == ["1: a"]


@pytest.mark.parametrize(
    ("before", "after", "reference"),
    [
        (engine(2), engine(2), engine(2)),  # nothing shows that the update wrote anything
        ([*engine(1)[:1], *engine(2)[:1]], engine(2), engine(2)),  # nor on one of the ranks
        (engine(1), engine(2)[:1], engine(2)),
        ([], [], []),
        (engine(1), [{}, {}], [{}, {}]),
    ],
)
def test_nothing_compared_is_not_bit_exact(before, after, reference):
    assert not bit_exact(before, after, reference)


def report(total, move, received=60, peak=5):
    ranks = tuple(RankReport(r, received, 40 + r, peak + r, {"move": move}) for r in range(2))
    return UpdateReport(
        success=True,
        message="",
        weight_version=None,
        transport="ipc",
        transport_reason="requested",
        bucket_bytes=1,
        seconds={"publish": 0.001, "total": total, "move": move, "commit": 0.0},
        engine_ranks=ranks,
        trainer_ranks=(),
    )


def seen(*copies, **refused):
    ours = Timed("ipc", 1.0, [0.2, 0.3, 0.4], [report(0.2, 0.1), report(0.3, 0.1)], 7, engine(1), engine(2))
    stock = Timed(STOCK, 9.0, [3.0, 6.0], [], 99, engine(1), engine(2))
    return Seen([ours, stock], refused, list(copies or (0.1,)), engine(2))


def test_rows_follow_from_what_was_seen():
    ours, stock = rows.rows_of(CASE, seen(0.5, 0.1, 0.05))
    assert (ours["seconds_median"], ours["updates"], ours["first_seconds"]) == (0.3, 3, 1.0)
    assert ours["times_limit"] == pytest.approx(3)
    assert ours["times_faster_than_stock"] == pytest.approx(15)
    assert ours["gb_per_s_per_rank"] == pytest.approx(41 / 0.3 / 1e9)
    assert ours["bytes_received_ratio"] == pytest.approx(1.5)
    assert (ours["peak_extra_bytes"], ours["trainer_peak_extra_bytes"]) == (6, 7)
    assert ours["control_seconds"] == pytest.approx(0.15)
    assert ours["bit_exact"]
    assert stock["bit_exact"]
    assert stock["times_faster_than_stock"] == 1
    assert stock["bytes_received_ratio"] == pytest.approx(CASE.model.bytes / 41)
    assert (stock["peak_extra_bytes"], stock["control_seconds"]) == (99, None)
    assert set(ours) == set(stock) >= REQUIRED


def test_where_none_of_our_paths_ran_what_is_lacking_is_not_known():
    with pytest.raises(ReshardError, match="no path that reports"):
        rows.rows_of(CASE, Seen([seen().timed[1]], {"ipc": "no such transport"}, [0.1], engine(2)))


def test_the_table_says_what_is_not_bit_exact(tmp_path):
    right, wrong = ({**rows.rows_of(CASE, seen())[0], "bit_exact": exact} for exact in (True, False))
    results.save(tmp_path / "bench.json", results.header("a command", ["a note"]), [right, wrong])
    table = pages.TABLES["benchmark"].text(tmp_path / "bench.json").splitlines()
    assert [line.split(" | ")[-1] for line in table if line.startswith("| ipc ")] == ["yes |", "NO |"]
    assert table[-1] == "- a note"


def test_results_are_published_into_their_document_unless_another_file_is_named(tmp_path, monkeypatch, capsys):
    source, page = tmp_path / "opens.json", tmp_path / "opens.md"
    page.write_text("Before.\n<!-- opens: begin -->\n<!-- opens: end -->\nAfter.\n")
    monkeypatch.setitem(pages.TABLES, "opens", pages.TABLES["opens"]._replace(document=str(page), source=source))
    row = {"case": "a loader", "tensors": 1000, "trainer_ranks": 2, "allocations": 3, "opened": 4}
    pages.publish("opens", "a command", [row], out=tmp_path / "other.json")
    assert not source.exists()
    pages.publish("opens", "a command", [row])
    assert results.load(source)[1] == [row]
    assert "| a loader | 1,000 | 2 | 3 | 4 |" in pages.written("opens")
    assert capsys.readouterr().out.count("| a loader |") == 2


@pytest.mark.parametrize("name", pages.TABLES)
def test_a_document_has_the_table_that_its_results_make(name):
    assert pages.written(name) == pages.TABLES[name].text(), f"python -m benchmark.pages {name} writes it anew"


def test_the_shapes_of_deepseek_v3_fill_each_engine_ranks_memory_without_a_gap():
    sizes = {w.name: math.prod(w.shape) for w in deepseek_v3.weights()}
    assert len(sizes) == 90_427
    taken = collections.Counter()
    for rank in range(4):
        filled, ends = collections.Counter(), collections.Counter()
        for copy in deepseek_v3.copies(rank, 4, 2):
            taken[copy.source] += copy.region.numel
            filled[copy.target] += copy.region.numel
            ends[copy.target] = max(ends[copy.target], copy.offset + copy.region.numel)
        assert filled == ends
    for name, numel in sizes.items():
        whole_on_each = any(part in name for part in ("norm", "mlp.gate.", "_a_proj"))
        assert taken[name] == numel * (4 if whole_on_each else 1), name
