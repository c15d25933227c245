"""Laws of streams: every element once and in order, in messages whose sizes add up to one bucket a round."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reshard.layout.regions import Box, Region
from sglang_reshard.plan.broadcast import ALIGN_BYTES
from sglang_reshard.plan.p2p import SendItem, SendRequest, cut_messages, round_bytes, send_request, sent_reads
from sglang_reshard.sources import Placement
from support.plans import copies_of, intakes, meshed_layouts, tensor_parallel, wanted

MIB = 1 << 20
ITEMS = st.lists(
    st.builds(SendItem, st.lists(st.integers(1, 7), max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8])), max_size=12
)
LINKS = st.tuples(st.integers(1, 5), st.integers(1, 5)).flatmap(
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


@given(items=ITEMS, share=st.integers(1, 40).map(lambda n: n * ALIGN_BYTES))
def test_a_stream_is_cut_into_messages_of_at_most_a_share(items, share):
    found = cut_messages(items, share)
    travelled = [[] for _ in items]
    last = -1
    for message in found:
        end = 0
        assert message.slices
        assert message.nbytes <= share
        for slot in message.slices:
            item = items[slot.item]
            assert slot.item >= last
            last = slot.item
            assert slot.offset % item.item_bytes == 0
            assert slot.offset >= end  # no overlap
            travelled[slot.item] += (own := elements(item, slot.box))
            end = slot.offset + len(own) * item.item_bytes
        assert message.nbytes == end
    assert travelled == [list(range(math.prod(item.shape))) for item in items]


@given(items=ITEMS)
def test_a_share_smaller_than_an_element_carries_one(items):
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


@given(links=LINKS, bucket=st.integers(1, 2 * 10**7))
def test_the_shares_of_every_rank_add_up_to_a_bucket(links, bucket):
    found = round_bytes(links, bucket)
    assert ((found > 0) == (links > 0)).all()
    assert (found % ALIGN_BYTES == 0).all()
    for axis in (0, 1):
        room = np.maximum(bucket, ALIGN_BYTES * (links > 0).sum(axis=axis))  # at the least one element of every link
        assert (found.sum(axis=axis) <= room).all()


@settings(max_examples=50)
@given(links=LINKS)
def test_all_links_end_together(links):
    """But those that would be cut into crumbs, which end earlier."""
    found = round_bytes(links, 4 * MIB)
    rounds = -(-links // np.maximum(found, 1))
    large = set(rounds[found > 64 * 1024].tolist())
    assert len(large) <= 1
    assert not large or rounds.max() in large


def test_a_small_link_is_not_starved_and_not_cut_into_crumbs():
    found = round_bytes(np.array([[1000 * MIB, 100 * MIB, 1000]]), 64 * MIB)
    assert (found[0, :2] / MIB).tolist() == pytest.approx([1000 / 18, 100 / 18], abs=0.01)
    assert found[0, 2] == 1008


def test_what_fits_into_a_bucket_goes_in_one_round():
    links = np.array([[16 * MIB, 16 * MIB], [0, 32 * MIB]])
    assert (round_bytes(links, 64 * MIB) == links).all()


@given(data=st.data())
def test_an_order_lists_what_a_trainer_rank_sends(data):
    layout = data.draw(meshed_layouts())
    _, (taken,) = intakes(layout, [data.draw(copies_of(layout))])
    sent = 0
    for trainer_rank in taken.traffic():
        order = msgspec.msgpack.decode(msgspec.msgpack.encode(send_request(taken, trainer_rank)), type=SendRequest)
        rows = sent_reads(taken, trainer_rank).tolist()
        assert not set(rows) & set(taken.duplicates)
        assert list(order.entries()) == [
            (taken.tensor_ids[taken.copy_ids[r]], taken.items[taken.item_ids[r]].local_region) for r in rows
        ]
        assert len(order.regions) == len(set(order.regions))
        items = order.items(layout)
        assert [item.nbytes for item in items] == [taken.items[taken.item_ids[r]].nbytes for r in rows]
        sent += sum(item.nbytes for item in items)
    assert sent == taken.least_bytes()


def test_elements_that_land_twice_are_sent_once():
    layout = tensor_parallel(2, [(4, 3)], [0])
    box = Box((0, 0), (2, 3))
    _, (taken,) = intakes(layout, [[wanted(layout, 0, box), wanted(layout, 0, box, offset=6)]])
    assert len(taken.reads_from(0)) == 2
    order = send_request(taken, 0)
    assert order.regions == (Region((0, 0), (2, 3), (1, 1)),)
    assert [item.nbytes for item in order.items(layout)] == [12]
    assert taken.least_bytes() == 12
    assert layout.placements == ((Placement(0),),)
