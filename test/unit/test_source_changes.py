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

from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import describe
from sglang_reshard.sources.memory_identity import MemoryIdentity
from sglang_reshard.trainer.publisher import ShardPublisher


def state():
    flat = torch.arange(24.0)
    return [("a", flat[:12].view(3, 4)), ("b", flat[12:]), ("c", torch.nn.Parameter(torch.ones(2, 2)))]


def detector(given):
    return MemoryIdentity.of(given, describe(given, trainer_rank=0, global_ranks=(0,)).inputs)


def test_tensors_written_in_place_are_unchanged():
    given = state()
    known = detector(given)
    with torch.no_grad():
        for _, tensor in given:
            tensor.mul_(2)
    assert known.unchanged(given)
    assert known.unchanged(list(given))


def moved(given):
    given[2][1].data = given[2][1].data.clone()
    return given


@pytest.mark.parametrize(
    "change",
    [
        moved,
        lambda given: given[:2],
        lambda given: given[::-1],
        lambda given: [("other", given[0][1]), *given[1:]],
        lambda given: [("a", given[0][1].clone()), *given[1:]],
        lambda given: [(*given[0], object()), *given[1:]],
    ],
    ids=["moved", "fewer", "reversed", "renamed", "copy", "spec"],
)
def test_anything_else_is_changed(change):
    given = state()
    known = detector(given)
    assert known.unchanged(given)
    assert not known.unchanged(change(given))


def test_a_transposed_tensor_in_the_same_memory_is_changed():
    given = [("a", torch.nn.Parameter(torch.ones(2, 2)))]
    known = detector(given)
    given[0][1].data = given[0][1].data.t()
    assert not known.unchanged(given)


def test_another_dtype_in_the_same_memory_is_changed():
    given = [("a", torch.ones(2, 2))]
    known = detector(given)
    given[0][1].data = given[0][1].data.view(torch.int32)
    assert not known.unchanged(given)


def test_a_part_of_the_same_memory_is_changed():
    given = [("a", torch.ones(4, 2))]
    known = detector(given)
    given[0][1].data = given[0][1].data[:2]
    assert not known.unchanged(given)


def test_freed_memory_is_changed():
    given = state()
    known = detector(given)
    given[2][1].untyped_storage().resize_(0)
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


def test_new_tensor_objects_of_the_same_memory_are_unchanged():
    """As state_dict() creates them every time."""
    given = state()
    known = detector(given)
    assert known.unchanged([(name, tensor.detach()) for name, tensor in given])


def test_tensors_whose_memory_is_not_read_have_no_detector():
    given = state()
    others = tuple(tensor.detach().clone() for _, tensor in given)
    assert MemoryIdentity.of(given, others) is None


def test_nothing_is_kept_alive():
    given = state()
    known = detector(given)
    kept = weakref.ref(given[2][1]), StorageWeakRef(given[2][1].untyped_storage())
    del given
    gc.collect()
    assert kept[0]() is None
    assert kept[1].expired()
    assert not known.unchanged(state())


def test_unchanged_tensors_are_not_described_again(monkeypatch):
    publisher = ShardPublisher(Session.host(), 0, (0,))
    given = state()
    first = publisher.publish(given)
    monkeypatch.setattr("sglang_reshard.trainer.publisher.describe", None)  # a call would fail
    assert publisher.publish(given) is first
    monkeypatch.undo()
    second = publisher.publish(moved(given))
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


# -- distributed tensors, as one rank of two has them


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def distributed(mesh):
    """DTensors among plain tensors, parameters and one with a spec of its own."""
    whole = torch.arange(32.0).view(8, 4)
    return [
        ("plain", torch.ones(3)),
        ("rows", torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))),
        ("columns", distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)),
        ("whole", distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None), None),
        ("parameter", torch.nn.Parameter(torch.ones(2))),
    ]


def as_rank_0_of_2(given):
    return MemoryIdentity.of(given, describe(given, trainer_rank=0, global_ranks=(0, 1)).inputs)


def local_moved(given):
    given[1][1]._local_tensor.data = given[1][1]._local_tensor.data.clone()


def local_replaced(given):
    given[2][1]._local_tensor = given[2][1]._local_tensor.clone()


def local_transposed(given):
    square = given[1][1]._local_tensor
    square.data = square.data.t()


def resharded(given):
    given[2][1]._spec = given[1][1]._spec


def resharded_with_a_spec_of_none(given):
    given[3][1]._spec = given[1][1]._spec


def made_plain(given):
    given[2] = ("columns", given[2][1]._local_tensor)


def made_distributed(given):
    given[0] = ("plain", given[2][1].detach().clone())


def plain_moved(given):
    given[4][1].data = given[4][1].data.clone()


def test_dtensors_written_in_place_are_unchanged(mesh):
    given = distributed(mesh)
    known = as_rank_0_of_2(given)
    with torch.no_grad():
        for _, tensor, *_ in given:
            (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).mul_(2)
    assert known.unchanged(list(given))


@pytest.mark.parametrize(
    "change",
    [
        local_moved,
        local_replaced,
        local_transposed,
        resharded,
        resharded_with_a_spec_of_none,
        made_plain,
        made_distributed,
        plain_moved,
    ],
    ids=lambda change: change.__name__,
)
def test_changed_dtensors_are_changed(mesh, change):
    given = distributed(mesh)
    known = as_rank_0_of_2(given)
    assert known.unchanged(given)
    change(given)
    assert not known.unchanged(given)


def test_local_tensors_of_dtensors_are_not_kept_alive(mesh):
    given = distributed(mesh)
    known = as_rank_0_of_2(given)
    kept = [weakref.ref(tensor._local_tensor) for _, tensor, *_ in given if isinstance(tensor, DTensor)]
    del given
    gc.collect()
    assert [reference() for reference in kept] == [None, None, None]
    assert not known.unchanged(distributed(mesh))


def test_a_module_of_dtensors_can_be_moved(mesh):
    """torch refuses that while anything refers to one of its parameters, even weakly."""
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    known = as_rank_0_of_2(list(model.named_parameters()))
    assert known.unchanged(list(model.state_dict().items()))
    model.double()
    assert not known.unchanged(list(model.named_parameters()))
