"""Parameters move between any two layouts of one world: bit-exactly, and no rank is sent an element that it holds."""

import contextlib
import functools
import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmark import mesh_to_mesh
from sglang_reshard import ReshardPlan, reshard
from sglang_reshard.errors import DeadlineExceeded, ReshardError
from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, ShardMap
from sglang_reshard.sources.fsdp1 import clean_name
from support.trainer_rows import shown
from support.world import run_world

# Even and uneven; of the small ones some ranks hold nothing.
SHAPES = {
    "even": (8, 12), "uneven": (7, 5), "single": (1,), "few": (2, 9), "vector": (10,), "cube": (5, 4, 6),
    "none": (0, 3),
}  # fmt: skip
BUCKET_BYTES = 300
F32, BF16 = torch.float32, torch.bfloat16


def wholes(version, dtype):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def element_numbers(dtype):
    """Wholes whose values say which element of its tensor each is: bfloat16 has all integers up to 256."""
    return {n: torch.arange(torch.Size(s).numel(), dtype=dtype).view(s) for n, s in SHAPES.items()}


# -- layouts: each gives a rank what it passes, and the memory that it has of each tensor by torch's own account


@functools.cache
def mesh_of(ranks, shape, names=("data", "model")):
    return DeviceMesh("cpu", torch.tensor(ranks).view(shape), mesh_dim_names=names[-len(shape) :])


def split_dim(name, shape):
    """Rows of some tensors, columns of others."""
    return 1 if name in ("uneven", "cube") and len(shape) > 1 else 0


def locals_of(tensors):
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def tensor_parallel(rank, values, ranks, data=1):
    """`data` replicas of a tensor parallel group, one after the other."""
    mesh = mesh_of(tuple(ranks), (data, len(ranks) // data))
    if rank not in ranks:
        return None, {}
    tensors = {
        name: distribute_tensor(v, mesh, [Replicate(), Shard(split_dim(name, v.shape))], src_data_rank=None)
        for name, v in values.items()
    }
    return list(tensors.items()), locals_of(tensors)


class Bag(nn.Module):
    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


def fsdp(rank, values, ranks, replicas=1):
    """FSDP2, and HSDP for several replicas. Passed as a module."""
    mesh = mesh_of(tuple(ranks), (replicas, len(ranks) // replicas) if replicas > 1 else (len(ranks),))
    if rank not in ranks:
        return None, {}
    module = fully_shard(Bag(values), mesh=mesh)
    return module, {name: p.to_local().detach() for name, p in module.named_parameters()}


def fsdp_over_tensor_parallel(rank, values, ranks):
    mesh = mesh_of(tuple(ranks), (2, len(ranks) // 2))
    if rank not in ranks:
        return None, {}
    bag = Bag(values)
    for name, v in values.items():
        sharded = distribute_tensor(v, mesh["model"], [Shard(0)], src_data_rank=None)
        bag.register_parameter(name, nn.Parameter(sharded))
    module = fully_shard(bag, mesh=mesh["data"])
    return module, {name: p.to_local().detach() for name, p in module.named_parameters()}


def flat_buffers(rank, values, ranks):
    """FSDP1's, over all ranks of the world. It takes no tensor without elements."""
    assert len(ranks) == dist.get_world_size()
    module = FSDP(Bag(values), use_orig_params=True, device_id=torch.device("cpu"))
    return module, {clean_name(name): p.detach() for name, p in module.named_parameters()}


def stages(rank, values, ranks):
    """Two pipeline stages of half of the tensors, each tensor parallel; both list `vector`."""
    half = len(ranks) // 2
    given, held = [], {}
    for stage, own in enumerate((ranks[:half], ranks[half:])):
        of_stage = {n: v for i, (n, v) in enumerate(values.items()) if n == "vector" or i % 2 == stage}
        items, local = tensor_parallel(rank, of_stage, own)
        given += items or []
        held |= local
    return given, held


def whole(rank, values, ranks):
    if rank not in ranks:
        return [], {}
    tensors = {name: v.clone() for name, v in values.items()}
    return list(tensors.items()), tensors


def two_generations(rank, values, ranks):
    """Replicas in different shardings: one tensor parallel over two ranks, one over the others."""
    first, second = (tensor_parallel(rank, values, part) for part in (ranks[:2], ranks[2:]))
    return (first[0] or []) + (second[0] or []), first[1] | second[1]


def last_rows_first(rank, values, ranks):
    """Explicit shardings that no mesh describes, in transposed local tensors with room beside the shards."""
    given, held = [], {}
    for name, v in values.items():
        rows = v.shape[0]
        cuts = [rows * i // len(ranks) for i in range(len(ranks) + 1)]
        boxes = [Box((cuts[i], *(0,) * (v.dim() - 1)), (cuts[i + 1], *v.shape[1:])) for i in range(len(ranks))]
        start = (1,) * v.dim()
        places = [(b, start, r) for b, r in zip(boxes, reversed(ranks), strict=True) if b.numel]
        mine = next((b for b, _, r in places if r == rank), None)
        local = torch.zeros(0, dtype=v.dtype)
        if mine is not None:
            room = torch.zeros([n + 2 for n in reversed(mine.shape)], dtype=v.dtype).permute(*reversed(range(v.dim())))
            held[name] = room[tuple(slice(1, 1 + n) for n in mine.shape)]
            held[name].copy_(v[mine.slices()])
            local = room
        given.append((name, local, ExplicitSharding(tuple(v.shape), ShardMap.of(places))))
    return given, held


# -- moves


def moved(trainer, source, target, dtypes):
    """What differs from torch's own distribution after each of two runs; bytes beside the least; the peak."""
    rank, (source_dtype, target_dtype) = trainer.rank, dtypes
    names = set(SHAPES) - ({"none"} if "flat_buffers" in (source[0], target[0]) else set())

    def side(of, values):
        build, *arguments = of
        return globals()[build](rank, {n: v for n, v in values.items() if n in names}, *arguments)

    given, held = side(source, wholes(0, source_dtype))
    wanted, written = side(target, {n: torch.zeros_like(v) for n, v in wholes(0, target_dtype).items()})
    sent = count_sent()
    plan = ReshardPlan.make(given, wanted, bucket_bytes=BUCKET_BYTES)
    assert sent == []
    differing = []
    for version in (1, 2):
        new = wholes(version, source_dtype)
        for name, local in side(source, new)[1].items():
            held[name].copy_(local)
        plan.run()
        expected = side(target, {n: v.to(target_dtype) for n, v in new.items()})[1]
        assert written.keys() == expected.keys()
        differing.append([name for name, local in expected.items() if not torch.equal(written[name], local)])
        differing[-1] += wrong_full_tensors(wanted, new)
    sides = (source, source_dtype), (target, target_dtype)  # where FSDP1 has an element depends on the dtype
    has, wants = (numbers_held(side(of, element_numbers(dtype))[1]) for of, dtype in sides)
    lacks = sum(len(wants[n] - has.get(n, set())) for n in wants) * source_dtype.itemsize
    own = sum(len(wants[n] & has.get(n, set())) for n in wants) * source_dtype.itemsize
    assert plan.received_bytes == lacks
    assert plan.copied_bytes == own
    assert plan.extra_bytes <= 4 * BUCKET_BYTES
    return differing, plan.received_bytes, plan.sent_bytes, sum(sent)


def numbers_held(local):
    return {name: set(t.flatten().long().tolist()) for name, t in local.items()}


def wrong_full_tensors(given, new):
    """Names of the DTensors whose full_tensor(), by torch's own gather, is not the whole."""
    items = given.named_parameters() if isinstance(given, nn.Module) else given or []
    plain = [
        (n, t) for n, t, *_ in items if isinstance(t, DTensor) and not any("Strided" in str(p) for p in t.placements)
    ]
    return [f"full {n}" for n, t in plain if not torch.equal(t.full_tensor(), new[n].to(t.dtype))]


def count_sent():
    """Bytes of each message that this rank really sends, from now on."""
    found, batch = [], dist.batch_isend_irecv

    def counted(operations):
        found.extend(o.tensor.nbytes for o in operations if o.op is dist.isend)
        return batch(operations)

    dist.batch_isend_irecv = counted
    return found


NAMES = {
    "tensor_parallel": "TP",
    "fsdp": "FSDP2",
    "fsdp_over_tensor_parallel": "FSDP2 over TP",
    "flat_buffers": "FSDP1",
    "stages": "pipeline stages of TP",
    "whole": "whole",
    "two_generations": "two TP groups",
    "last_rows_first": "explicit shardings",
}


def layout_name(kind, ranks, replicas=1):
    return f"{NAMES[kind]} of {len(ranks)}" + f", {replicas} replicas" * (replicas > 1)


def check(record_property, ranks, source, target, dtypes=(F32, F32)):
    told, _ = run_world(ranks, 0, moved, None, source, target, dtypes)
    assert [differing for differing, *_ in told] == [[[], []]] * ranks
    received, sent, on_wire = (sum(column) for column in list(zip(*told, strict=True))[1:])
    assert received == sent
    messages_room = 16 * len(SHAPES) * ranks * ranks * 4  # between the boxes of a message
    assert 2 * sent <= on_wire <= 2 * sent + 2 * messages_room
    row = shown(f"torch, {layout_name(*source)}", f"reshard to {layout_name(*target)}", "p2p", "run", 1.0)
    record_property("trainer", row)


def test_fsdp_to_tensor_parallel_on_the_same_ranks(record_property):
    check(record_property, 4, ("fsdp", range(4)), ("tensor_parallel", range(4)))


MOVES = [
    (4, ("tensor_parallel", (1, 2)), ("fsdp", range(4))),
    (6, ("tensor_parallel", (0, 1)), ("tensor_parallel", (2, 3, 4, 5))),
    (4, ("fsdp", range(4), 2), ("tensor_parallel", range(4), 2)),
    (8, ("fsdp", range(8), 2), ("tensor_parallel", range(8), 4)),
    (4, ("stages", (0, 1, 2, 3)), ("fsdp", range(4))),
    (4, ("fsdp", range(4)), ("stages", (2, 3, 0, 1))),
    (3, ("flat_buffers", range(3)), ("tensor_parallel", range(3))),
    (4, ("tensor_parallel", range(4)), ("flat_buffers", range(4))),
    (4, ("fsdp_over_tensor_parallel", range(4)), ("tensor_parallel", range(4))),
    (4, ("tensor_parallel", range(4)), ("fsdp_over_tensor_parallel", range(4))),
    (5, ("fsdp", (0, 2, 4)), ("two_generations", (0, 1, 2, 3, 4))),
    (4, ("whole", (0, 1)), ("fsdp", range(4))),
    (4, ("tensor_parallel", range(4)), ("whole", (0, 3))),
    (3, ("last_rows_first", range(3)), ("fsdp", range(3))),
    (3, ("fsdp", range(3)), ("last_rows_first", range(3))),
    (2, ("tensor_parallel", (0,)), ("tensor_parallel", (1,))),
]


@pytest.mark.sweep
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, F32)])
@pytest.mark.parametrize(("ranks", "source", "target"), MOVES)
def test_any_layout_to_any_other(ranks, source, target, dtypes, record_property):
    check(record_property, ranks, source, target, dtypes)


def within_a_group(trainer):
    """From global ranks 1 and 3 to 2 and 3; rank 0 takes no part."""
    group = dist.new_group([1, 2, 3])
    values = element_numbers(F32)
    given, _ = tensor_parallel(trainer.rank, values, (1, 3))
    zeros = {name: torch.zeros_like(v) for name, v in values.items()}
    wanted, written = tensor_parallel(trainer.rank, zeros, (2, 3))
    _, expected = tensor_parallel(trainer.rank, values, (2, 3))
    if trainer.rank > 0:
        reshard(given, wanted, group)
    return [name for name, local in expected.items() if not torch.equal(written[name], local)]


def test_some_ranks_of_the_world_move_among_themselves():
    assert run_world(4, 0, within_a_group, None)[0] == [[]] * 4


def reloaded(trainer):
    """A target on the host, from which another plan reloads while this rank computes and others communicate."""
    rank, versions = trainer.rank, []
    mesh = mesh_of((0, 1), (2,))
    own_group = dist.new_group([0, 1])
    trained = distribute_tensor(torch.zeros(600, 40), mesh, [Shard(0)], src_data_rank=None)
    on_host = torch.empty(300, 40)
    held = DTensor.from_local(on_host, mesh, [Shard(0)])
    served = distribute_tensor(torch.zeros(600, 40), mesh, [Shard(1)], src_data_rank=None)
    offload = ReshardPlan.make([("a", trained)], [("a", held)])
    reload = ReshardPlan.make([("a", held)], [("a", served)], own_group, bucket_bytes=1000)
    for version in (1, 2):
        trained.to_local().fill_(version + rank)
        offload.run()
        moving = reload.start()
        seen = torch.ones(50, 50).matmul(torch.ones(50, 50)).sum()
        dist.all_reduce(seen)  # of another group
        moving.wait()
        versions.append((moving.is_completed(), served.to_local().unique().tolist(), float(seen)))
    with moved_slowly(reload._mover) as begin:
        moving = reload.start()
        with pytest.raises(
            ReshardError, match="trainer rank 0: the plan is running; call wait on the handle that start returned"
        ):
            reload.run()
        begin.set()
        moving.wait()
    on_host.untyped_storage().resize_(0)
    with pytest.raises(ReshardError, match="the memory of a was freed or has moved"):
        reload.start()
    return versions


@contextlib.contextmanager
def moved_slowly(mover):
    """Lets a move begin when the event is set."""
    begin, run = threading.Event(), mover.run
    mover.run = lambda: begin.wait(30) and run()
    yield begin
    del mover.run


def test_a_reload_from_the_host_overlaps():
    versions = [(True, [1.0, 2.0], 250_000.0), (True, [2.0, 3.0], 250_000.0)]
    assert run_world(2, 0, reloaded, None)[0] == [versions] * 2


# -- memory


def shared(trainer):
    """Source and target in the same memory: rows of a whole, one more whole, and a part that is elsewhere."""
    rank = trainer.rank
    mesh = mesh_of((0, 1), (2,))
    expected = torch.arange(24.0).view(6, 4)
    full = torch.zeros(6, 4)
    full[3 * rank : 3 * rank + 3] = expected[3 * rank : 3 * rank + 3]
    rows = DTensor.from_local(full[3 * rank : 3 * rank + 3], mesh, [Shard(0)])
    plan = ReshardPlan.make([("a", rows)], [("a", full)])
    plan.run()
    same = ReshardPlan.make([("a", full)], [("a", full)])
    same.run(drop_source=True)  # the target uses it, so it stays
    told = torch.equal(full, expected), plan.copied_bytes, plan.received_bytes, same.copied_bytes, same.received_bytes
    halves = full[:3], full[3:]
    with pytest.raises(ReshardError, match="trainer rank 0: the source's a shares memory with the target"):
        reshard([("a", halves[0]), ("b", halves[1])], [("a", halves[1]), ("b", halves[0])])
    assert torch.equal(full, expected)
    return told


def dropped(trainer):
    mesh = mesh_of((0, 1), (2,))
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    source = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
    target = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)], src_data_rank=None)
    plan = ReshardPlan.make([("a", source)], [("a", target)])
    plan.run(drop_source=True)
    left = source.to_local().untyped_storage().nbytes()
    with pytest.raises(ReshardError, match="trainer rank 0: the plan's source was dropped; make a new plan"):
        plan.run()
    again = ReshardPlan.make([("a", target)], [("a", target)])
    if trainer.rank == 1:  # offloaded by its owner
        target.to_local().untyped_storage().resize_(0)
    with pytest.raises(ReshardError, match="trainer rank 1: the memory of a was freed or has moved"):
        again.run()
    return left


def test_the_same_memory_is_left_alone_and_a_dropped_source_is_freed():
    told, _ = run_world(2, 0, shared, None)
    assert told == [(True, 0, 48, 0, 0)] * 2
    assert run_world(2, 0, dropped, None)[0] == [0, 0]


# -- failures


def refused(trainer):
    """Each case's error on this rank."""
    mesh = mesh_of((0, 1), (2,))

    def sharded(*shape, dtype=F32, dim=0):
        return distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [Shard(dim)], src_data_rank=None)

    a, b = ("a", sharded(4, 4)), ("b", sharded(4, 4))
    one = trainer.rank == 1
    cases = {
        "target only": ([a], [a, b] if one else [a]),
        "source only": ([a, b], [a]),
        "shape": ([a], [("a", torch.zeros(4, 5) if one else torch.zeros(4, 4))]),
        "cast": ([a], [("a", sharded(4, 4, dtype=torch.int32))]),
        "kind": ([a], [a, ("b", "no tensor")] if one else [a]),
        "half": ([("a", torch.zeros(2, 2))] if one else [a], [a]),
        "nothing": (None, [a]),
        "broken": (iter_and_fail(a) if one else [a], [a]),
    }
    told = {}
    for what, (source, target) in cases.items():
        with pytest.raises(ReshardError) as error:
            reshard(source, target)
        told[what] = str(error.value)
    with pytest.raises(ReshardError) as error:
        reshard([a], [a], bucket_bytes=100 + trainer.rank)
    told["options"] = str(error.value)
    left = ("b", sharded(4, 4, dim=1))
    left[1].to_local().fill_(7.0)
    reshard([a, ("c", sharded(3))], [("a", sharded(4, 4, dim=1)), left], strict=False)
    assert left[1].to_local().eq(7.0).all()
    return told


def iter_and_fail(item):
    yield item
    raise KeyError("lost")


def test_what_is_refused_is_named_on_every_rank():
    told, _ = run_world(2, 0, refused, None)
    assert told[0] == told[1]
    expected = {
        "target only": "trainer rank 1: the target has 1 tensors that are in no trainer rank's source: b",
        "source only": "the source has 1 tensors that are in no trainer rank's target: b",
        "shape": "trainer rank 1: a has shape (4, 5) in the target and (4, 4) in the source",
        "cast": "trainer rank 0: a is int32 in the target and float32 in the source, and a cast",
        "kind": "trainer rank 1: b is a str, not a torch.Tensor",
        "half": "a is float32 (4, 4) on trainer rank 0, but float32 (2, 2) on trainer rank 1",
        "nothing": "no trainer rank passed any source tensors",
        "broken": "trainer rank 1: KeyError: 'lost'",
        "options": "trainer rank 1 has the options {'bucket_bytes': 101, 'strict': True}, but trainer rank 0 has {'b",
    }
    for what, text in expected.items():
        assert told[0][what].startswith(text), what


def left_alone(trainer, in_a_thread):
    """Rank 1 agrees to a run, and leaves."""
    mesh = mesh_of((0, 1), (2,))
    source = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
    plan = ReshardPlan.make([("a", source)], [("a", torch.zeros(4, 4))])
    run = (lambda: plan.start().wait()) if in_a_thread else plan.run
    if trainer.rank == 1:
        plan._mover.run = lambda: None
        run()
        return ""
    with pytest.raises(DeadlineExceeded) as error:
        run()
    gc.collect()
    return str(error.value)


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_rank_that_is_lost_is_named(in_a_thread):
    (told, _), _ = run_world(2, 0, left_alone, None, in_a_thread)
    assert told.startswith("trainer rank 0 could not receive from trainer rank 1")
    assert "The target is only partly written" in told


@pytest.mark.sweep
def test_the_benchmark_measures_ways_that_move_all():
    rows = mesh_to_mesh.measure(mesh_to_mesh.Size(4, (64, 32)), moves=2)
    assert {row["case"] for row in rows} == set(mesh_to_mesh.CASES)
    assert all(row["bit_exact"] for row in rows)
    received = {row["case"]: row["received_bytes"] for row in rows if row["way"] == "reshard"}
    # Of every matrix a quarter, but for the quarter of that which it has; of half of them; and with dp=2, half of every
    # matrix, of which rank 1 has nothing of the rows and a quarter of the columns.
    nbytes = 4 * 64 * 32 * 2
    assert list(received.values()) == [nbytes * 3 // 16, nbytes * 3 // 32, nbytes * 7 // 16]
