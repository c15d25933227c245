"""Message streams of p2p: one bucket per round, shared evenly, and what is read twice is sent once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.layout.regions import ALIGN_BYTES, Box, LocalRegion
from sglang_reshard.routes.p2p.messages import (
    SendItem,
    cut_messages,
    round_bytes,
    send_request,
)  # fmt: skip
from sglang_reshard.sources import Placement
from support.plans import read_plans, tensor_parallel, wanted
from support.sweep import examples

MIB = 1 << 20
NBYTES = st.tuples(st.integers(1, 5), st.integers(1, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(st.one_of(st.just(0), st.integers(1, 10**7)), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    ).map(lambda rows: np.array(rows, np.int64))
)


def test_many_small_items_fill_a_message_and_a_large_one_is_split_by_rows():
    small, large = SendItem((8,), 4), SendItem((10, 64), 2)
    found = cut_messages([small, small, large, small], 512)
    assert [[(s.item, s.box and s.box.slices()[0], s.offset) for s in m.slices] for m in found] == [
        [(0, None, 0), (1, None, 32)],
        [(2, slice(0, 4), 0)],
        [(2, slice(4, 8), 0)],
        [(2, slice(8, 10), 0), (3, None, 256)],
    ]


@given(nbytes=NBYTES, bucket=st.integers(1, 2 * 10**7))
def test_the_bytes_of_a_round_fit_a_bucket_on_every_rank(nbytes, bucket):
    found = round_bytes(nbytes, bucket)
    assert ((found > 0) == (nbytes > 0)).all()
    assert (found % ALIGN_BYTES == 0).all()
    for axis in (0, 1):
        room = np.maximum(bucket, ALIGN_BYTES * (nbytes > 0).sum(axis=axis))  # at least one element for every peer
        assert (found.sum(axis=axis) <= room).all()


@settings(max_examples=examples(50))
@given(nbytes=NBYTES)
def test_all_streams_end_together(nbytes):
    """Except those at the minimum message size, which end earlier."""
    found = round_bytes(nbytes, 4 * MIB)
    rounds = -(-nbytes // np.maximum(found, 1))
    large = set(rounds[found > 64 * 1024].tolist())
    assert len(large) <= 1
    assert not large or rounds.max() in large


def test_a_small_stream_is_neither_starved_nor_cut_below_the_minimum():
    found = round_bytes(np.array([[1000 * MIB, 100 * MIB, 1000]]), 64 * MIB)
    assert (found[0, :2] / MIB).tolist() == pytest.approx([1000 / 18, 100 / 18], abs=0.01)
    assert found[0, 2] == 1008


def test_transfers_that_fit_a_bucket_take_one_round():
    nbytes = np.array([[16 * MIB, 16 * MIB], [0, 32 * MIB]])
    assert (round_bytes(nbytes, 64 * MIB) == nbytes).all()


def test_duplicate_reads_are_sent_once():
    layout = tensor_parallel(2, [(4, 3)], [0])
    box = Box((0, 0), (2, 3))
    _, (plan,) = read_plans(layout, [[wanted(layout, 0, box), wanted(layout, 0, box, offset=6)]])
    assert len(plan.reads_from(0)) == 2
    request = send_request(plan, 0)
    assert request.regions == (LocalRegion((0, 0), (2, 3), (1, 1)),)
    assert [item.nbytes for item in request.items(layout)] == [12]
    assert plan.least_bytes() == 12
    assert layout.placements == ((Placement(0),),)
