"""Every kind of DTensor that torch can make, read by this package and gathered by torch's own `full_tensor`.

torch's LocalTensorMode runs all ranks of a mesh in one process, collectives included.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from sglang_reshard.errors import ReshardError
from sglang_reshard.sources import describe

# Without an underscore in torch 2.10.
MaskPartial = getattr(placement_types, "_MaskPartial", None) or placement_types.MaskPartial
SAME, REFUSED, WRONG = "same", "refused", "wrong"
SHAPES = ((7, 5), (13,), (8, 4), (1, 6), (0, 3), (2, 3, 5))  # uneven, even, some ranks have none, no elements
MESHES = ((2,), (3,), (2, 2), (3, 2), (2, 2, 2), (2, 2, 2, 2))


@dataclass(frozen=True)
class Case:
    """A DTensor to be made of a whole tensor.

    mesh        makes the device mesh
    make        makes the DTensor of the whole tensor, on all ranks; the local tensor is a LocalTensor
    """

    family: str
    mesh_shape: tuple[int, ...]
    what: str
    whole: torch.Tensor
    make: Callable[[torch.Tensor], DTensor]


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    ours     "same" as the whole tensor, "wrong", or "refused"
    torchs   "same", "wrong", or the kind of the error that full_tensor raised
    message  of the refusal
    """

    case: Case
    ours: str
    torchs: str
    message: str = ""


@contextlib.contextmanager
def world(size: int) -> Iterator[None]:
    """All ranks of a world of `size`, in this process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    logging.disable(logging.WARNING)  # torch tells how full_tensor could be faster
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """Runs as one rank of a world, with a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def judged(case: Case, size: int) -> Outcome | None:
    """Compares what all ranks hold by our layout, and torch's full_tensor, with the whole tensor. Inside `world`.

    None if this version of torch does not make the DTensor.
    """
    with LocalTensorMode(size):
        try:
            tensor = case.make(case.whole)
        except (RuntimeError, ValueError, AssertionError, NotImplementedError):
            return None
        local = tensor._local_tensor
        locals_ = local._local_tensors if isinstance(local, LocalTensor) else dict.fromkeys(range(size), local)
        try:
            gathered = tensor.full_tensor()
            fulls = getattr(gathered, "_local_tensors", {0: gathered}).values()
            torchs = SAME if all(same(full, case.whole) for full in fulls) else WRONG
        except Exception as error:
            torchs = type(error).__name__
    ranks, shards, layouts = tuple(range(size)), [], []
    try:
        for rank in ranks:
            own = DTensor(locals_[rank], tensor._spec, requires_grad=False)
            state = describe([("w", own)], trainer_rank=rank, global_ranks=ranks)
            layouts.append(state.layout)
            shards.append(state.shards[0])
    except ReshardError as error:
        return Outcome(case, REFUSED, torchs, str(error))
    alike = all(layout == layouts[0] for layout in layouts)
    return Outcome(case, SAME if alike and put_together(layouts[0], shards, case.whole) else WRONG, torchs)


def put_together(layout: Any, shards: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Returns whether every shard of every rank is its box of the whole tensor, and all elements are held."""
    (tensor,) = layout.tensors
    held = layout.shard_map(tensor)
    for shard in held.shards:
        inside = tuple(slice(a, a + n) for a, n in zip(shard.local_start, shard.box.shape, strict=True))
        if not all(same(shards[rank][inside], whole[shard.box.slices()]) for rank in shard.ranks):
            return False
    return held.covered_elements() == whole.numel() and tensor.shape == tuple(whole.shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape, dtype and bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.detach().clone().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


# -- how torch makes them


def counted(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(tuple(shape))


def distributed(mesh: DeviceMesh, placements: Sequence[Any]) -> Callable[[torch.Tensor], DTensor]:
    return lambda whole: distribute_tensor(whole, mesh, placements, src_data_rank=None)


def redistributed(mesh: DeviceMesh, placements: Sequence[Any], **spec: Any) -> Callable[[torch.Tensor], DTensor]:
    """By torch's redistribution of a replicated tensor, which takes any spec."""

    def make(whole: torch.Tensor) -> DTensor:
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        source = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)
        target = DTensorSpec(mesh, tuple(placements), meta, **spec)
        everywhere = LocalTensor({rank: whole.clone() for rank in range(dist.get_world_size())})
        return DTensor(redistribute_local_tensor(everywhere, source, target), target, requires_grad=False)

    return make


# -- the cases of a mesh


def plain(mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    for shape in shapes:
        for placements in _placed(mesh.ndim, len(shape)):
            yield _case("Shard, Replicate", mesh, shape, placements, distributed(mesh, placements))
    whole = (Replicate(),) * mesh.ndim
    yield _case("Shard, Replicate", mesh, (), whole, distributed(mesh, whole))


def ordered(mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    """Every order of mesh dimensions but the default one."""
    for shape in shapes:
        for placements in _placed(mesh.ndim, len(shape)):
            default = DTensorSpec.compute_default_shard_order(placements)
            for mesh_dims in itertools.product(*(itertools.permutations(entry.mesh_dims) for entry in default)):
                order = tuple(ShardOrderEntry(e.tensor_dim, dims) for e, dims in zip(default, mesh_dims, strict=True))
                if order != default:
                    make = redistributed(mesh, placements, shard_order=order)
                    yield _case("shard_order", mesh, shape, (placements, order), make)


def strided(mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    """Split factors that state an order, made as FSDP2 does; others, made as distribute_tensor does."""
    sizes = tuple(mesh.shape)
    factors = {math.prod(some) for n in range(len(sizes)) for some in itertools.combinations(sizes, n)}
    for shape in shapes:
        for dim, chosen in itertools.product(range(min(2, len(shape))), itertools.product(factors, repeat=mesh.ndim)):
            if set(chosen) == {1}:
                continue
            placements = tuple(Shard(dim) if f == 1 else _StridedShard(dim, split_factor=f) for f in chosen)
            if DTensorSpec._maybe_convert_StridedShard_to_shard_order(placements, mesh) is not None:
                make = redistributed(mesh, placements)
                yield _case("_StridedShard that states an order", mesh, shape, placements, make)
            elif mesh.ndim < 4:
                make = distributed(mesh, placements)
                yield _case("_StridedShard that states none", mesh, shape, placements, make)


def viewed(mesh: DeviceMesh) -> Iterator[Case]:
    """What torch makes of views that join sharded dimensions: strided, and in the default order."""
    size = mesh.size()
    for shape in ((2, 2 * size), (3, size, 2), (2 * size, size)):
        for placements in _placed(mesh.ndim, len(shape)):

            def make(whole: torch.Tensor, placements: Any = placements, shape: Any = shape) -> DTensor:
                return distribute_tensor(whole.view(shape), mesh, placements, src_data_rank=None).view(whole.shape)

            whole, family = counted((math.prod(shape),)), "a view that joins dimensions"
            yield Case(family, tuple(mesh.shape), f"{shape} {placements}", whole, make)


def reduced(mesh: DeviceMesh) -> Iterator[Case]:
    """Placements whose shards have to be reduced."""
    masked = MaskPartial(offset_shape=torch.Size((8, 4)), offset_dim=0)
    kinds = [Partial("sum"), Partial("avg"), Partial("max"), masked]
    for partial, place in itertools.product(kinds, range(mesh.ndim)):
        placements = [Replicate()] * mesh.ndim
        placements[place] = partial

        def make(whole: torch.Tensor, placements: Any = tuple(placements)) -> DTensor:
            meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
            everywhere = LocalTensor({rank: whole.clone() for rank in range(dist.get_world_size())})
            return DTensor(everywhere, DTensorSpec(mesh, placements, meta), requires_grad=False)

        family = "MaskPartial" if isinstance(partial, MaskPartial) else "Partial"
        yield _case(family, mesh, (8, 4), placements, make)


def of_dtypes(mesh: DeviceMesh) -> Iterator[Case]:
    """All dtypes of torch but quantized ones and those that are not whole bytes."""
    found = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    for dtype in sorted(found, key=str):
        name = str(dtype).removeprefix("torch.")
        if name.startswith(("q", "bits")) or re.fullmatch(r"u?int[1-7]|float4.*", name):
            continue
        raw = torch.arange(8 * 4 * dtype.itemsize) % 2
        whole = raw.to(torch.uint8).view(dtype).view(8, 4)
        family = "complex dtypes" if dtype.is_complex else "other dtypes"
        placements = (Shard(0),) + (Replicate(),) * (mesh.ndim - 1)
        yield Case(family, tuple(mesh.shape), name, whole, distributed(mesh, placements))


def on_parts(shapes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    """On one and two dimensions of a mesh of three, on dimensions that were flattened, and on unflattened ones."""
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    flat = init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
    parts = {f"mesh[{name!r}]": root[name] for name in "abc"}
    parts |= {f"mesh[{x!r}, {y!r}]": root[x, y] for x, y in ("ab", "bc", "ac")}
    parts |= {f"{x}{y}, flattened": root[x, y]._flatten(f"{x}{y}") for x, y in ("ab", "bc", "ac")}
    if hasattr(flat, "_unflatten"):
        parts["unflattened"] = flat._unflatten(0, (4, 2), ("left", "right"))
        parts["a part of an unflattened mesh"] = parts["unflattened"]["right"]
    for (name, mesh), shape in itertools.product(parts.items(), shapes):
        for placements in _placed(mesh.ndim, len(shape)):
            made = _case("submeshes, flattened and unflattened", mesh, shape, placements, distributed(mesh, placements))
            yield Case(made.family, (2, 2, 2), f"{name} {made.what}", made.whole, made.make)


def _placed(mesh_dims: int, dims: int) -> Iterator[tuple[Any, ...]]:
    choices = [Replicate(), *(Shard(dim) for dim in range(dims))]
    yield from itertools.product(choices, repeat=mesh_dims)


def _case(family: str, mesh: DeviceMesh, shape: tuple[int, ...], what: Any, make: Callable[..., DTensor]) -> Case:
    return Case(family, tuple(mesh.shape), f"{shape} {what}", counted(shape), make)


def cases_on(mesh_shape: tuple[int, ...], shapes: Sequence[tuple[int, ...]] = SHAPES) -> Iterator[Case]:
    """All cases of a mesh of all ranks. Inside `world`."""
    with LocalTensorMode(math.prod(mesh_shape)):
        mesh = init_device_mesh("cpu", mesh_shape)
    few = {1: shapes, 2: shapes, 3: shapes[:2], 4: shapes[1:2]}[mesh.ndim]
    yield from plain(mesh, few)
    # torch searches for a way to redistribute, which takes half a minute on four dimensions.
    some = 12 if mesh.ndim == 4 else 1
    yield from itertools.islice(ordered(mesh, few), 0, None, some)
    yield from itertools.islice(strided(mesh, few), 0, None, some)
    yield from reduced(mesh)
    if mesh.ndim < 3:
        yield from viewed(mesh)
        yield from of_dtypes(mesh)


def outcomes(mesh_shape: tuple[int, ...] | None, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Iterator[Outcome]:
    """The outcomes of all cases on a mesh of a shape; None: on parts of a mesh of eight ranks."""
    size = 8 if mesh_shape is None else math.prod(mesh_shape)
    with world(size):
        if mesh_shape is None:
            with LocalTensorMode(size):
                found = list(on_parts(shapes[:2]))
        else:
            found = list(cases_on(mesh_shape, shapes))
        yield from filter(None, (judged(case, size) for case in found))
