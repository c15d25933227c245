"""What other processes say is checked before it is used: each lie is refused in words that name who told it."""

import os
import time
import zlib

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout import Box, Region
from sglang_reshard.manifests import (
    check_connect,
    check_handles,
    check_layout,
    check_order,
    check_request,
    inflate,
    layouts,
    pack_blob,
    unpack_blob,
)
from sglang_reshard.messages import Connect
from sglang_reshard.plan import Catalog, Seat, intake
from sglang_reshard.plan.streams import Order, order_of
from sglang_reshard.sources import Held, Holdings, Layout, Mesh, Piece, Placement, SourceTensor, describe
from sglang_reshard.sources.holdings import fault
from sglang_reshard.sources.placements import EXPLICIT
from sglang_reshard.transports.memory import CudaStorage, Handles, MemoryExporter, PeerMemory, ShardView, ShmStorage
from support.plans import tensor_parallel, wanted
from support.toy import checkpoint
from support.toy_fused import fused
from test_placements import as_rank

BIG = 1 << 62


# -- how they travel


def test_what_was_packed_is_unpacked():
    layout = tensor_parallel(2, [(4, 3), (5,)], [0, -1])
    digest, blob = pack_blob(layout)
    assert unpack_blob(blob, Layout, digest) == layout == unpack_blob(blob, Layout)


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        (lambda blob: blob[:-1], "cut short"),
        (lambda blob: blob + b"x", "something follows it"),
        (lambda blob: b"", "cut short"),
        (lambda blob: b"not zlib", "damaged"),
        (lambda blob: zlib.compress(msgspec.msgpack.encode("other")), "content hash"),
        (lambda blob: zlib.compress(bytes(20_000)), "more than 10,000 bytes"),
    ],
)
def test_another_blob_in_its_place_is_refused(spoiled, says):
    digest, blob = pack_blob(tensor_parallel(2, [(4, 3)], [0]))
    with pytest.raises(Mismatch, match=f"the source layout .*{says}"):
        unpack_blob(spoiled(blob), Layout, digest, what="the source layout", max_bytes=10_000)


def test_a_small_blob_of_gigabytes_takes_no_memory():
    bomb = zlib.compress(bytes(1 << 26))
    assert len(bomb) < 1 << 17
    with pytest.raises(Mismatch, match="more than 1,000 bytes"):
        inflate(bomb, 1000)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x81\xa1y" + b"\x91" * 10_000 + b"\x01",  # nested deeper than anybody recurses
        b"\x81\xa2\xff\xfe\x01",  # no UTF-8
        msgspec.msgpack.encode({"trainer_ranks": "two"}),
        b"\xdd\xff\xff\xff\xff",  # four thousand million elements, it says
    ],
)
def test_what_is_no_manifest_is_refused(raw):
    with pytest.raises(Mismatch, match="cannot be read"):
        unpack_blob(zlib.compress(raw), Layout)


# -- layouts


def stated(held, shape=(4, 2), trainer_ranks=2):
    return Layout(trainer_ranks, (), (), (SourceTensor("w", shape, "float32", EXPLICIT, 0),), (held,))


def rows(*held):
    return Holdings(tuple(Piece(Box((a, 0), (b, 2)), ranks, (at, 0)) for a, b, ranks, at in held))


ALL = rows((0, 2, (0,), 0), (2, 4, (1,), 0))
GOOD = tensor_parallel(2, [(4, 3), (4, 3), (5,)], [0, 0, -1])
SPLIT = ((Placement(0),),)


def of_one(shape=(4, 3), dtype="float32", mesh=None, placements=SPLIT, numbers=(0, 0)):
    return Layout(2, (mesh or Mesh((2,), (0, 1)),), placements, (SourceTensor("w", shape, dtype, *numbers),))


def test_honest_layouts_pass():
    check_layout(GOOD, 2)
    check_layout(stated(ALL), 2)
    check_layout(of_one(shape=(), placements=((Placement(),),)), 2)
    check_layout(of_one(shape=(0, 3)), 2)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (replace(GOOD, trainer_ranks=3), "of 3 trainer ranks, the update of 2"),
        (replace(GOOD, tensors=GOOD.tensors + GOOD.tensors[:1]), "the tensor t0 twice"),
        (of_one(dtype="complex64"), "w: the dtype 'complex64' is not carried"),
        (of_one(shape=(4, -1)), r"w: the shape \(4, -1\)"),
        (of_one(shape=(4,) * 17), "w: the shape"),
        (of_one(shape=(BIG, 8)), "w: the shape .* more than"),
        (of_one(shape=(BIG, 0)), "w: the shape .* more than"),
        (of_one(numbers=(1, 0)), "w: the layout has no mesh number 1"),
        (of_one(numbers=(-2, 0)), "w: the layout has no mesh number -2"),
        (of_one(numbers=(0, -1)), "no placements number -1"),
        (of_one(numbers=(EXPLICIT, 0)), "no stated holdings number 0"),
        (of_one(mesh=Mesh((3,), (0, 1))), r"w: its mesh of shape \(3,\) has 2 ranks"),
        (of_one(mesh=Mesh((2,), (0, 2))), "trainer ranks that are not of this update"),
        (of_one(mesh=Mesh((2,), (1, 1))), "a trainer rank twice"),
        (of_one(mesh=Mesh((0,), ())), "no such dimensions"),
        (of_one(mesh=Mesh((2,), (0, -1))), "hold 6 of its 12 elements"),
        (of_one(placements=((),)), "0 placements on a mesh of 1 dimensions"),
        (of_one(placements=((Placement(2),),)), "split others"),
        (of_one(placements=((Placement(-2),),)), "split others"),
        (of_one(placements=((Placement(0, 0),),)), "into no parts"),
        (of_one(placements=((Placement(0, BIG),),)), "more than there are ranks or elements"),
        (of_one(shape=(BIG >> 8,), placements=((Placement(0, BIG >> 9),),)), "more than 4,194,304 intervals"),
        (stated(rows((0, 2, (0,), 0))), "hold 4 of its 8 elements"),
        (stated(rows((0, 3, (0,), 0), (2, 4, (1,), 0))), "elements in common"),
        (stated(rows((0, 2, (0,), 0), (2, 5, (1,), 0))), "not inside the shape"),
        (stated(rows((0, 2, (0,), -1), (2, 4, (1,), 0))), "not inside the shape"),
        (stated(rows((0, 4, (), 0))), "ascending order"),
        (stated(rows((0, 4, (1, 0), 0))), "ascending order"),
        (stated(rows((0, 4, (0, 2), 0))), "of which there are 2"),
        (stated(Holdings(ALL.pieces * 50)), "100 pieces, more than 99"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(layout, says, monkeypatch):
    monkeypatch.setattr(layouts, "MAX_STATED_PIECES", 99)
    digest, blob = pack_blob(layout)
    with pytest.raises(Mismatch, match=says):
        check_layout(unpack_blob(blob, Layout, digest), 2)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_boxes_with_elements_in_common_are_found_wherever_they_are(dims):
    """Against each with each, in random grids of which one box was made larger, or none."""
    generator = np.random.default_rng(dims)
    for _ in range(40):
        cuts = [np.sort(generator.choice(np.arange(1, 30), 3, replace=False)) for _ in range(dims)]
        edges = [list(zip([0, *c], [*c, 30], strict=True)) for c in cuts]
        picked = np.stack(np.meshgrid(*(range(4) for _ in range(dims))), -1).reshape(-1, dims)
        boxes = [Box(*zip(*(edges[d][int(i)] for d, i in enumerate(index)), strict=True)) for index in picked]
        grown = int(generator.integers(len(boxes)))
        if generator.random() < 0.7:
            dim = int(generator.integers(dims))
            stop = tuple(min(30, n + 1) if d == dim else n for d, n in enumerate(map(int, boxes[grown].stop)))
            boxes[grown] = Box(boxes[grown].start, stop)
        clash = any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
        found = fault(Held((30,) * dims, Holdings.of((box, (0,) * dims, 0) for box in boxes)), 1)
        assert bool(found and "in common" in found) == clash


def test_many_stated_boxes_are_checked_in_time():
    """64 x 512 blocks of a matrix: each with each would take minutes."""
    held = [(Box((a, b), (a + 1, b + 1)), (0, 0), 0) for a in range(64) for b in range(512)]
    started = time.process_time()
    assert fault(Held((64, 512), Holdings.of(held)), 1) is None
    assert time.process_time() - started < 10


# -- handles


@pytest.fixture(scope="module")
def shards():
    """Trainer rank 0's: half of two matrices in one buffer, and a whole vector."""
    flat = torch.arange(16, dtype=torch.bfloat16)
    return [flat[:6].view(2, 3), flat[6:12].view(3, 2).t(), torch.ones(5, dtype=torch.bfloat16)]


@pytest.fixture(scope="module")
def handles(shards):
    found = MemoryExporter(0).export(shards)
    check_handles(found, GOOD, 0)
    return found


def with_view(number, **changes):
    def change(handles):
        shards = list(handles.shards)
        shards[number] = replace(shards[number], **changes)
        return replace(handles, shards=tuple(shards))

    return change


def with_storage(number, **changes):
    def change(handles):
        storages = list(handles.storages)
        storages[number] = replace(storages[number], **changes)
        return replace(handles, storages=tuple(storages))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_view(1, storage=2), "trainer rank 0: the shard of t1 .* there are 2 storages"),
        (with_view(1, storage=-1), "the shard of t1 .* there are 2 storages"),
        (with_view(1, storage=-2), "the shard of t1"),
        (with_view(0, offset=-1), "the shard of t0"),
        (with_view(0, offset=11), "the shard of t0 .* reaches to byte 34 of 32"),
        (with_view(0, offset=BIG), "the shard of t0"),
        (with_view(0, strides=(14, 1)), "the shard of t0 .* reaches to byte 34 of 32"),
        (with_view(0, strides=(-3, 1)), "the shard of t0 .* no strides"),
        (with_view(0, strides=(3,)), "the shard of t0 .* no strides"),
        (with_view(0, strides=(BIG, BIG)), "the shard of t0"),
        (with_view(2, strides=(2,)), "the shard of t2"),
        (lambda h: replace(h, shards=h.shards[:2]), "2 shards of a layout of 3 tensors"),
        (lambda h: replace(h, shards=(*h.shards, h.shards[0])), "4 shards of a layout of 3 tensors"),
        (lambda h: replace(h, storages=h.storages[:1]), "the shard of t2"),
        (with_storage(1, nbytes=8), "the shard of t2 .* reaches to byte 10 of 8"),
        (with_storage(1, nbytes=0), "storage number 1 of trainer rank 0"),
        (with_storage(1, nbytes=BIG), "storage number 1 of trainer rank 0"),
        (with_storage(1, pid=0), "storage number 1 of trainer rank 0"),
        (with_storage(1, pid=-1), "storage number 1 of trainer rank 0"),
        (with_storage(1, fd=-1), "storage number 1 of trainer rank 0"),
        (with_storage(1, fd=1 << 31), "storage number 1 of trainer rank 0"),
        (with_storage(1, inode=-1), "storage number 1 of trainer rank 0"),
    ],
)
def test_handles_of_other_memory_than_there_is_are_refused(handles, change, says):
    with pytest.raises(Mismatch, match=says):
        check_handles(change(handles), GOOD, 0)


@pytest.mark.parametrize(("tp", "ranks"), [(1, 1), (2, 2), (2, 4)])
def test_what_trainers_with_fused_tensors_hand_over_passes(tp, ranks):
    """Shards that are larger than what is held of them, several of one local tensor, some of none."""
    for rank in range(ranks):
        given = list(fused(checkpoint(1), tp, ranks, rank))
        with as_rank(rank, ranks):
            state = describe(given, trainer_rank=rank, global_ranks=tuple(range(ranks)))
        check_layout(state.layout, ranks)
        handles = MemoryExporter(rank).export(state.shards)
        check_handles(handles, state.layout, rank)
        peer = PeerMemory(rank, handles)
        for number, tensor in enumerate(state.layout.tensors):
            for piece in state.layout.holdings(tensor).of_rank(rank):
                at = piece.in_shard(Region.of(piece.box))
                assert torch.equal(peer.region(number, at, torch.float32), state.shards[number][at.slices()])


def test_offsets_count_in_elements_of_the_tensors_own_dtype():
    """The same numbers fit for bytes and do not for floats."""
    views = (ShardView(0, 3, (1,)),)
    storages = (ShmStorage(1, 0, 1, 11),)
    for dtype, fits in (("uint8", True), ("bfloat16", False), ("float32", False)):
        layout = Layout(1, (Mesh((1,), (0,)),), ((Placement(0),),), (SourceTensor("w", (8,), dtype, 0, 0),))
        if fits:
            check_handles(Handles(storages, views), layout, 0)
        else:
            with pytest.raises(Mismatch, match="the shard of w"):
                check_handles(Handles(storages, views), layout, 0)


def test_stated_holdings_reach_as_far_as_their_pieces_lie():
    layout = stated(rows((0, 2, (0,), 0), (2, 4, (1,), 3)))
    storages = (ShmStorage(1, 0, 1, 40),)
    check_handles(Handles(storages, (ShardView(0, 0, (2, 1)),)), layout, 1)
    with pytest.raises(Mismatch, match=r"a shard of \(5, 2\)"):
        check_handles(Handles(storages, (ShardView(0, 1, (2, 1)),)), layout, 1)


CUDA = CudaStorage("uuid", b"h" * 66, 1 << 20, 0, b"/torch_12_345_0", 3, b"e" * 64, True)
FLAT = Layout(1, (Mesh((1,), (0,)),), ((Placement(0),),), (SourceTensor("w", (8,), "float32", 0, 0),))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"nbytes": 31}, "the shard of w"),
        ({"nbytes": -1}, "storage number 0"),
        ({"offset_bytes": -512}, "byte -512 of its allocation"),
        ({"ref_counter_offset": 10_000}, "no counter number 10000"),  # torch would write there, beyond the file
        ({"ref_counter_offset": -1}, "no counter number -1"),
        ({"ref_counter_handle": b"/../etc/x"}, "no file of torch's counters"),
        ({"ref_counter_handle": b""}, "no file of torch's counters"),
        ({"event_handle": b"short"}, "handles have 66 and 5 bytes"),
        ({"handle": b""}, "no handle"),
        ({"event_handle": b""}, "no handle"),
    ],
)
def test_handles_of_gpu_memory_that_cannot_be_are_refused(changes, says):
    handles = Handles((replace(CUDA, **changes),), (ShardView(0, 0, (1,)),))
    if not says:
        check_handles(handles, FLAT, 0)
        return
    with pytest.raises(Mismatch, match=says):
        check_handles(handles, FLAT, 0)


def test_a_region_beyond_the_mapped_memory_is_refused_even_without_the_checks(handles):
    peer = PeerMemory(0, handles)
    pages = 2 * 4096
    assert peer.view(0, pages - 8, (1,), (8,), torch.uint8).numel() == 8
    for offset, strides, count in ((pages - 7, (1,), (8,)), (0, (BIG,), (2,)), (-1, (1,), (1,)), (9, (-1,), (3,))):
        with pytest.raises(Mismatch, match="outside of it"):
            peer.view(0, offset, strides, count, torch.uint8)
    with pytest.raises(Mismatch, match="is empty"):
        PeerMemory(0, with_view(1, storage=-1)(handles)).region(1, Region((0, 0), (1, 1), (1, 1)), torch.bfloat16)


# -- what is opened


def storage_of(descriptor, nbytes=None):
    status = os.fstat(descriptor)
    return ShmStorage(os.getpid(), descriptor, status.st_ino, status.st_size if nbytes is None else nbytes)


def refused(descriptor, nbytes=None):
    before = len(os.listdir("/proc/self/fd"))
    started = time.monotonic()
    with pytest.raises(Mismatch, match=r"trainer rank 4 .* no shared memory without a name"):
        PeerMemory(4, Handles((storage_of(descriptor, nbytes),), ()))
    assert time.monotonic() - started < 5
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(path := tmp_path / "pipe")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    refused(descriptor, 4096)
    os.close(descriptor)


def test_devices_folders_and_files_with_a_name_are_not_mapped(tmp_path):
    named = "/dev/shm/sglang_reshard_test_manifests"
    for path, flags in ((tmp_path, os.O_RDONLY), ("/dev/zero", os.O_RDONLY), (named, os.O_RDWR | os.O_CREAT)):
        descriptor = os.open(path, flags)
        try:
            refused(descriptor, 4096)
        finally:
            os.close(descriptor)
            if path == named:
                os.unlink(named)


def test_a_file_on_a_disk_is_not_mapped():
    """Without a name, as shared memory is, but cut short by whoever can write to the disk."""
    descriptor = os.open(os.path.dirname(__file__), os.O_RDWR | os.O_TMPFILE)
    os.ftruncate(descriptor, 4096)
    refused(descriptor)
    os.close(descriptor)


def test_shared_memory_of_another_size_is_not_mapped():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4096)
    PeerMemory(4, Handles((storage_of(descriptor),), ()))
    for nbytes in (4095, 4097, 1 << 30):
        with pytest.raises(Mismatch, match=rf"trainer rank 4 .* 4,096 bytes, not .* {nbytes:,} bytes"):
            PeerMemory(4, Handles((storage_of(descriptor, nbytes),), ()))
    os.close(descriptor)
    with pytest.raises(Unsupported, match="cannot be opened"):
        PeerMemory(4, Handles((ShmStorage(os.getpid(), descriptor, 1, 1),), ()))


# -- orders and words


@pytest.fixture(scope="module")
def order():
    """Of all three tensors, in this order."""
    boxes = Box((0, 0), (2, 3)), Box((1, 1), (2, 3)), Box((0,), (5,))
    copies = [wanted(GOOD, number, box, 10 * number) for number, box in enumerate(boxes)]
    taken = intake(Catalog.of(GOOD), copies, Seat(0, 1, "a", ("a", "b")))
    found = order_of(taken, 0)
    check_order(found, GOOD, 0, 3)
    return found


def numbers(*values):
    return np.array(values, "<i4").tobytes()


def at(region):
    return lambda order: replace(order, regions=(region, *order.regions[1:]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda o: replace(o, tensors=o.tensors[:-1]), "columns have"),
        (lambda o: replace(o, tensors=o.tensors[:-4]), "columns have"),
        (lambda o: replace(o, tensors=numbers(0, 1, 3), elements=numbers(0, 1, 2)), "from 0 to 3 of 3 tensors"),
        (lambda o: replace(o, tensors=numbers(0, -1), elements=numbers(0, 0)), "from -1 to 0 of 3 tensors"),
        (lambda o: replace(o, elements=numbers(0, 1, 99)), "of 3 regions"),
        (lambda o: replace(o, tensors=numbers(2, 1, 0)), "not inside its shard of"),
        (at(Region((1, 0), (2, 3), (1, 1))), r"not inside its shard of t0, which has the shape \(2, 3\)"),
        (at(Region((-1, 0), (1, 1), (1, 1))), "not inside its shard of t0"),
        (at(Region((0, 0), (2, 2), (1, 3))), "not inside its shard of t0"),
        (at(Region((0, 0), (2, 3), (0, 1))), "not inside its shard of t0"),
        (at(Region((0, 0), (2, 0), (1, 1))), "not inside its shard of t0"),
        (at(Region((0, 0), (1, 1), (BIG, 1))), "not inside its shard of t0"),
        (at(Region((BIG, BIG), (BIG, BIG), (BIG, BIG))), "not inside its shard of t0"),
        (at(Region((0,), (2,), (1,))), "not inside its shard of t0"),
        (lambda o: replace(o, tensors=o.tensors * 60, elements=o.elements * 60), "asks for .* elements of a rank"),
    ],
)
def test_an_order_for_other_elements_than_there_are_is_refused(order, change, says):
    with pytest.raises(Mismatch, match=f"the order of engine rank 3 for trainer rank 0 .*{says}"):
        check_order(change(order), GOOD, 0, 3)


def test_a_trainer_rank_that_holds_nothing_of_a_tensor_is_not_asked_for_it(order):
    layout = stated(rows((0, 4, (1,), 0)))
    asked = Order((Region((0, 0), (1, 1), (1, 1)),), numbers(0), numbers(0))
    check_order(asked, layout, 1, 0)
    with pytest.raises(Mismatch, match=r"w, which has the shape \(0,\)"):
        check_order(asked, layout, 0, 0)


CONNECT = Connect("route", ("a", "b"), ((0, 16), (32, 0)), "gloo", 5.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shares": ((0, 16),)}, "for 1 trainer ranks, and there are 2"),
        ({"shares": ((0, 16), (1,))}, "trainer rank 1 1 shares for 2 engine ranks"),
        ({"intakes": ("a",)}, "trainer rank 0 2 shares for 1 engine ranks"),
        ({"shares": ((0, -16), (1, 0))}, "a share of trainer rank 0"),
        ({"shares": ((0, BIG), (1, 0))}, "a share of trainer rank 0"),
        ({"backend": "mpi"}, "neither gloo nor nccl"),
        ({"timeout_s": float("nan")}, "waits of nan s"),
        ({"timeout_s": 0.0}, "waits of 0.0 s"),
        ({"route": "x" * 5000}, "more than 4,096 characters"),
    ],
)
def test_a_word_to_connect_that_makes_no_sense_is_refused(changes, says):
    check_connect(CONNECT, 2)
    with pytest.raises(Mismatch, match=says):
        check_connect(replace(CONNECT, **changes), 2)


class Request(msgspec.Struct, frozen=True):
    """The fields of a request that are looked at."""

    update: int = 1
    layout: str = "l"
    handles: tuple[str, ...] = ("a", "b")
    trainer_hosts: tuple[str, ...] = ("h", "h")
    routes: tuple[str, ...] = ()
    weight_version: str | None = None
    transport: str = "auto"
    bucket_bytes: int = 1
    timeout_s: float = 1.0
    ignore: tuple[str, ...] = ()
    package_version: str = ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"handles": ("a",)}, "2 trainer ranks, with 1 memory handles"),
        ({"handles": (), "trainer_hosts": ()}, "of 0 trainer ranks"),
        ({"routes": ("r",)}, "1 routes"),
        ({"update": -1}, "the number -1"),
        ({"bucket_bytes": 0}, "buckets of 0 bytes"),
        ({"bucket_bytes": BIG}, "buckets of"),
        ({"timeout_s": float("inf")}, "waits of inf s"),
        ({"timeout_s": -1.0}, "waits of -1.0 s"),
        ({"ignore": ("x" * 5000,)}, "a name of 5,000 characters"),
    ],
)
def test_a_request_that_no_sender_makes_is_refused(changes, says):
    check_request(Request())
    with pytest.raises(Mismatch, match=says):
        check_request(replace(Request(), **changes))


def test_the_checks_of_a_hundred_thousand_tensors_take_seconds_at_most():
    """They run once a session; a check that goes through tensors times ranks would take minutes."""
    count, ranks = 100_000, 64
    layout = tensor_parallel(ranks, [(64, 16), (128,)] * (count // 2), [0, -1] * (count // 2))
    views = tuple(ShardView(i % 8, 0, (16, 1) if i % 2 == 0 else (1,)) for i in range(count))
    handles = Handles(tuple(ShmStorage(1, fd, 1, 4096) for fd in range(8)), views)
    started = time.process_time()
    check_layout(layout, ranks)
    check_handles(handles, layout, 5)
    assert time.process_time() - started < 5
