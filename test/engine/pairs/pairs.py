"""A pair: a trainer's mesh and placements, and an engine that they are resharded into. Hypothesis draws them."""

from __future__ import annotations

import itertools
import math

import msgspec
from hypothesis import strategies as st

from pair_models import MODELS, WITH_EXPERTS
from support.nixl_env import FOLDER as NIXL

# What a mesh dimension does to a tensor: replicate it (R), split its dimension 0 or 1 (S0, S1; counted modulo the
# tensor's dimensions), split it after the mesh dimensions to the right have (X0, X1: FSDP2 over tensor
# parallelism), or nothing, the tensor's own mesh being without that dimension (-). No letters at all: a plain tensor.
Placing = tuple[str, ...]
_PLAIN: list[Placing] = [()]
_CROSSED: list[Placing] = [("X0", "S0"), ("X1", "S1"), ("-", "S0"), ("-", "S1"), ("S0", "-")]


TRANSPORTS = ["broadcast", "ipc", "p2p", "auto", *(["nixl"] if NIXL.exists() else [])]


class Pair(msgspec.Struct, frozen=True):
    """The tensors of the checkpoint take turns with `placings`; `tp` and `ep` are the engine's."""

    model: str
    mesh: tuple[int, ...]
    placings: tuple[Placing, ...]
    mesh_reversed: bool
    trainer_dtype: str
    engine_dtype: str
    tp: int
    ep: int
    bucket_bytes: int
    transport: str = "broadcast"

    @property
    def trainers(self) -> int:
        return math.prod(self.mesh)


def tp_to_tp(source: int, target: int, model: str = "dense", bucket_bytes: int = 1 << 20) -> Pair:
    """A plain tensor-parallel trainer."""
    placings = (("S0",), ("S1",))
    return Pair(model, (source,), placings, False, "float32", "bfloat16", target, 1, bucket_bytes)


def meshes(trainers: int) -> list[tuple[int, ...]]:
    """All shapes, of up to three dimensions, whose sizes are greater than one."""
    deeper = [(n, *rest) for n in range(2, trainers) if trainers % n == 0 for rest in meshes(trainers // n)]
    return [(trainers,), *(shape for shape in deeper if len(shape) <= 3)]


def placings(mesh: tuple[int, ...]) -> list[Placing]:
    simple = itertools.product(("R", "S0", "S1"), repeat=len(mesh))
    return [*_PLAIN, *simple, *(_CROSSED if len(mesh) == 2 else [])]


@st.composite
def pairs(draw: st.DrawFn, engine_sizes: tuple[int, ...]) -> Pair:
    mesh = draw(st.integers(1, 8).map(meshes).flatmap(st.sampled_from))
    placing = st.sampled_from(placings(mesh))
    model = draw(st.sampled_from(sorted(MODELS)))
    tp = draw(st.sampled_from(engine_sizes))
    experts_split_by = [n for n in (1, 2, 4) if tp % n == 0] if model in WITH_EXPERTS else [1]
    return Pair(
        model=model,
        mesh=mesh,
        placings=tuple(draw(st.lists(placing, min_size=1, max_size=4))),
        mesh_reversed=draw(st.booleans()),
        trainer_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        engine_dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        tp=tp,
        ep=draw(st.sampled_from(experts_split_by)),
        bucket_bytes=draw(st.one_of(st.integers(1, 64), st.integers(65, 4096), st.just(1 << 20))),
        transport=draw(st.sampled_from(TRANSPORTS)),
    )
