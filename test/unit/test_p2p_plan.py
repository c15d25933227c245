"""Properties of message streams: every element once, in order, and at most one bucket per round."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.layout.regions import ALIGN_BYTES, Box, LocalRegion, aligned
from sglang_reshard.routes.p2p.messages import (
    SendItem,
    SendRequest,
    cut_messages,
    round_bytes,
    send_request,
    sent_reads,
    take_apart,
)  # fmt: skip
from sglang_reshard.sources import Placement
from support.plans import copies_of, meshed_layouts, read_plans, tensor_parallel, wanted
from support.sweep import examples

MIB = 1 << 20
ITEMS = st.lists(
    st.builds(SendItem, st.lists(st.integers(1, 7), max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8])), max_size=12
)
NBYTES = st.tuples(st.integers(1, 5), st.integers(1, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(st.one_of(st.just(0), st.integers(1, 10**7)), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    ).map(lambda rows: np.array(rows, np.int64))
)


def elements(item, box):
    """Row-major numbers of a box's elements within its item."""
    return (
        np.arange(math.prod(item.shape)).reshape(item.shape)[(box or Box.whole(item.shape)).slices()].ravel().tolist()
    )


@given(items=ITEMS, message_bytes=st.integers(1, 40).map(lambda n: n * ALIGN_BYTES))
def test_a_stream_is_cut_into_messages_of_bounded_size(items, message_bytes):
    found = cut_messages(items, message_bytes)
    sent = [[] for _ in items]
    last = -1
    for message in found:
        end = 0
        assert message.slices
        assert message.nbytes <= message_bytes
        for part in message.slices:
            item = items[part.item]
            assert part.item >= last
            last = part.item
            assert part.offset % item.item_bytes == 0
            assert part.offset >= end  # no overlap
            sent[part.item] += (own := elements(item, part.box))
            assert part.nbytes == len(own) * item.item_bytes
            end = part.offset + part.nbytes
        assert message.nbytes == end
    assert sent == [list(range(math.prod(item.shape))) for item in items]


@given(items=ITEMS, message_bytes=st.integers(1, 40).map(lambda n: n * ALIGN_BYTES), least_bytes=st.integers(1, 1000))
def test_large_slices_are_messages_by_themselves_and_the_others_stay_together(items, message_bytes, least_bytes):
    for message in cut_messages(items, message_bytes):
        parts = take_apart(message, least_bytes)
        slices = [(part.item, part.box) for part in message.slices]
        small = [(part.item, part.box) for part in message.slices if part.nbytes < least_bytes]
        assert [(s.item, s.box) for part in parts for s in part.slices] == small + [s for s in slices if s not in small]
        assert len(parts) == len(slices) - len(small) + bool(small)
        assert sum(aligned(part.nbytes) for part in parts) <= message_bytes
        for part in parts:
            ends = [0, *(s.offset + s.nbytes for s in part.slices)]
            assert all(s.offset == aligned(end) for s, end in zip(part.slices, ends, strict=False))
            assert part.nbytes == ends[-1]


@given(items=ITEMS)
def test_a_message_smaller_than_an_element_has_one(items):
    found = cut_messages(items, 1)
    assert sum(len(m.slices) for m in found) == sum(math.prod(i.shape) if i.nbytes > 1 else 1 for i in items)
    assert all(m.nbytes <= 8 for m in found)


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


@given(data=st.data())
def test_a_send_request_lists_what_a_trainer_rank_sends(data):
    layout = data.draw(meshed_layouts())
    _, (plan,) = read_plans(layout, [data.draw(copies_of(layout))])
    sent = 0
    for trainer_rank in plan.traffic():
        request = msgspec.msgpack.decode(msgspec.msgpack.encode(send_request(plan, trainer_rank)), type=SendRequest)
        reads = sent_reads(plan, trainer_rank).tolist()
        assert not set(reads) & set(plan.duplicates)
        assert list(request.entries()) == [
            (plan.tensor_ids[plan.copy_ids[r]], plan.items[plan.item_ids[r]].local_region) for r in reads
        ]
        assert len(request.regions) == len(set(request.regions))
        items = request.items(layout)
        assert [item.nbytes for item in items] == [plan.items[plan.item_ids[r]].nbytes for r in reads]
        sent += sum(item.nbytes for item in items)
    assert sent == plan.least_bytes()


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
