"""Change detection: the same memory in the same sharding is unchanged, everything else is changed."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

from sglang_reshard.layout.regions import Box
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import FusedSlice, FusedTensor, blocks, describe, memory_identity
from sglang_reshard.sources.memory_identity import MemoryIdentity
from sglang_reshard.trainer.publisher import ShardPublisher


@pytest.fixture(autouse=True)
def rank_0_of_2():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def plain():
    flat = torch.arange(24.0)
    return [("a", flat[:12].view(3, 4)), ("b", flat[12:]), ("c", torch.nn.Parameter(torch.ones(2, 2)))]


def distributed():
    """DTensors among plain tensors, parameters and one with a spec of its own."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(32.0).view(8, 4)
    return [
        ("plain", torch.ones(3)),
        ("rows", torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))),
        ("columns", distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)),
        ("whole", distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None), None),
        ("parameter", torch.nn.Parameter(torch.ones(2))),
    ]


def fused_tensor(first="a"):
    return FusedTensor(((first, FusedSlice((0, 0), (1, 4), (1,))), ("b", FusedSlice((1, 0), (2, 4), (1,)))))


def explicit(rows=2):
    return blocks((2, 2), [Box((0, 0), (rows, 2))] * (2 // rows))


def fused():
    return [
        ("fused", torch.ones(2, 4), fused_tensor()),
        ("c", torch.ones(2, 2), explicit()),
        ("d", torch.ones(2), None),
    ]


def detector(given):
    return MemoryIdentity.of(given, describe(given, trainer_rank=0, global_ranks=(0, 1)).inputs)


@pytest.mark.parametrize("make", [plain, distributed, fused])
def test_tensors_written_in_place_are_unchanged(make):
    given = make()
    known = detector(given)
    with torch.no_grad():
        for _, tensor, *_ in given:
            (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).mul_(2)
    assert known.unchanged(given)
    assert known.unchanged(list(given))
    if make is not distributed:  # new objects of the same memory, as state_dict() creates them every time
        assert known.unchanged([(name, tensor.detach(), *rest) for name, tensor, *rest in given])


def test_equal_descriptions_are_unchanged():
    given = fused()
    stack, explicitly, whole = given
    assert detector(given).unchanged([(*stack[:2], fused_tensor()), (*explicitly[:2], explicit()), whole])


CHANGES = {
    plain: [
        "given[2][1].data = given[2][1].data.clone()",
        "given[2][1].data = given[2][1].data.t()",
        "given[2][1].untyped_storage().resize_(0)",
        "given[0][1].data = given[0][1].data.view(torch.int32)",
        "given[0][1].data = given[0][1].data[:2]",
        "given[0] = ('a', given[0][1].clone())",
        "given[0] = ('other', given[0][1])",
        "given[0] = (*given[0], object())",
        "given.reverse()",
        "given.pop()",
    ],
    distributed: [
        "given[1][1]._local_tensor.data = given[1][1]._local_tensor.data.clone()",
        "given[1][1]._local_tensor.data = given[1][1]._local_tensor.data.t()",
        "given[2][1]._local_tensor = given[2][1]._local_tensor.clone()",
        "given[2][1]._spec = given[1][1]._spec",
        "given[3][1]._spec = given[1][1]._spec",
        "given[2] = ('columns', given[2][1]._local_tensor)",
        "given[0] = ('plain', given[2][1].detach().clone())",
        "given[4][1].data = given[4][1].data.clone()",
    ],
    fused: [
        "given[0] = (*given[0][:2], fused_tensor('other'))",
        "given[0] = given[0][:2]",
        "given[0] = ('fused', given[0][1].clone(), given[0][2])",
        "given[1] = (*given[1][:2], explicit(rows=1))",
        "given[1] = ('c', given[1][1].t(), given[1][2])",
    ],
}


@pytest.mark.parametrize(
    ("make", "change"), [(make, change) for make, changes in CHANGES.items() for change in changes]
)
def test_anything_else_is_changed(make, change):
    given = make()
    known = detector(given)
    assert known.unchanged(given)
    exec(change, globals(), {"given": given})
    assert not known.unchanged(given)


def test_reused_memory_is_changed():
    """The next storage of its size is likely to reuse the memory of one that was freed."""
    room = bytearray(16)
    known = detector([("a", torch.frombuffer(room, dtype=torch.float32))])
    for _ in range(10):
        another = torch.frombuffer(room, dtype=torch.float32)
        assert not known.unchanged([("a", another)])


def test_the_end_of_a_storage_that_was_moved_to_shared_memory_is_noticed():
    tensor = torch.ones(4)
    known = detector([("a", tensor)])
    tensor.share_memory_()  # in place: the storage object stays
    known_there, views = detector([("a", tensor)]), tensor.detach()
    assert not known.unchanged([("a", tensor)])
    del tensor
    assert known_there.unchanged([("a", views)])
    del views
    gc.collect()
    assert known_there._freed


def test_a_negated_view_is_changed():
    numbers = torch.ones(3, dtype=torch.complex64)
    known = detector([("a", numbers.imag)])
    assert known.unchanged([("a", numbers.imag)])
    assert not known.unchanged([("a", numbers.conj().imag)])


def test_tensors_whose_memory_is_not_read_have_no_detector():
    given = plain()
    others = tuple(tensor.detach().clone() for _, tensor in given)
    assert MemoryIdentity.of(given, others) is None


@pytest.mark.parametrize("make", [plain, distributed])
def test_nothing_is_kept_alive(make):
    given = make()
    known = detector(given)
    tensors = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for _, tensor, *_ in given]
    kept = [weakref.ref(tensor) for tensor in tensors]
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    del given, tensors
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)
    assert all(storage.expired() for storage in storages)
    assert not known.unchanged(make())


@pytest.mark.parametrize("make", [plain, fused])
def test_unchanged_tensors_are_not_described_again(monkeypatch, make):
    publisher = ShardPublisher(Session.host(), 0, (0,))
    given = make()
    first = publisher.publish(given)
    if make is fused:
        assert [t.name for t in first.source.tensors] == ["a", "b", "c", "d"]
        assert [shard.numel() for shard in publisher.shards(given)] == [4, 4, 4, 2]
    monkeypatch.setattr("sglang_reshard.trainer.publisher.describe", None)  # a call would fail
    assert publisher.publish(list(given)) is first
    monkeypatch.undo()
    given[-1][1].data = given[-1][1].data.clone()
    second = publisher.publish(given)
    assert (second.layout, second.source) == (first.layout, first.source)
    assert second.handles != first.handles
    publisher.close()


def test_unchanged_tensors_do_not_trigger_the_garbage_collector():
    """A full collection costs all ranks half a second, and every pair that is passed counts towards the next."""
    publisher = ShardPublisher(Session.host(), 0, (0,))
    state = {f"tensor.{i}": view for i, view in enumerate(torch.zeros(5000).split(1))}
    publisher.publish(state.items())
    collections = []
    thresholds = gc.get_threshold()
    publisher.publish(state.items())  # fills Python's stock of tuples
    gc.collect(0)  # counts from here
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        gc.set_threshold(1000)
        for _ in range(5):
            publisher.publish(((n, t) for n, t in state.items()))
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*thresholds)
    assert collections == []
    assert gc.isenabled()
    publisher.close()


def test_a_module_of_dtensors_can_be_moved():
    """torch refuses that while anything refers to one of its parameters, even weakly."""
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    known = detector(list(model.named_parameters()))
    assert known.unchanged(list(model.state_dict().items()))
    model.double()
    assert not known.unchanged(list(model.named_parameters()))


def test_a_storage_of_another_size_is_changed(monkeypatch):
    """One that was resized to less, and back to more, may be where it was; its tensors may not fit any more."""
    given = [("w", torch.ones(4))]
    known = MemoryIdentity.of(given, describe(given, trainer_rank=0, global_ranks=(0,)).inputs)
    assert known.unchanged(given)
    monkeypatch.setattr(memory_identity, "_nbytes", lambda storage: 12)
    assert not known.unchanged(given)
