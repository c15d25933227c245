"""A trainer's layout from a few words: checkpoint tensors on a mesh of copies, FSDP2 shards and tensor parallelism."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sglang_reshard.cli.plan.request import Source
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.layout.source_layout import Mesh, Placement, SourceLayout, SourceTensor, in_order_of_strides

# Tensor parallelism as trainers have it: what leads into a block's middle is split by rows, what leads out of it by
# columns, and norms, routers and biases of the latter are whole on every rank.
_LEADS_OUT = re.compile(r"(^|\.)(o_proj|out_proj|wo|down_proj|w2|c_proj|dense|dense_4h_to_h|fc2)\.")
_WHOLE = re.compile(r"(^|\.)(gate|router|\w*norm\w*|ln_\w+)\.|e_score_correction_bias")


def layout_of(specs: Sequence[TensorSpec], source: Source) -> SourceLayout:
    """All tensors, as trainer ranks of such a mesh hold them.

    FSDP2 splits dimension 0, after tensor parallelism has; a tensor without dimensions is whole on every rank.
    """
    shape = tuple(n for n in (source.copies, source.shards, source.tensor_parallel) if n > 1) or (1,)
    mesh = Mesh(shape, tuple(range(source.trainer_ranks)))
    meshes: dict[Mesh, int] = {}
    placements: dict[tuple[Placement, ...], int] = {}
    tensors = []
    for spec in specs:
        sharding = in_order_of_strides(mesh, _placements(spec, source))
        number = meshes.setdefault(sharding.mesh, len(meshes))
        placed = placements.setdefault(sharding.placements, len(placements))
        tensors.append(SourceTensor(spec.name, spec.shape, spec.dtype, number, placed))
    return SourceLayout(source.trainer_ranks, tuple(meshes), tuple(placements), tuple(tensors))


def _placements(spec: TensorSpec, source: Source) -> tuple[Placement, ...]:
    tensor_dim = _tensor_parallel_dim(spec)
    found = [Placement()] if source.copies > 1 else []
    if source.shards > 1:
        # torch's _StridedShard: the mesh dimension to the right has split this dimension first.
        after = source.tensor_parallel if tensor_dim == 0 else 1
        found.append(Placement(0, after) if spec.shape else Placement())
    if source.tensor_parallel > 1:
        found.append(Placement(tensor_dim))
    return tuple(found) or (Placement(),)


def _tensor_parallel_dim(spec: TensorSpec) -> int:
    """The dimension that tensor parallelism splits; -1 for none."""
    if not spec.shape or _WHOLE.search(spec.name):
        return -1
    if _LEADS_OUT.search(spec.name):
        return len(spec.shape) - 1 if len(spec.shape) > 1 else -1
    return 0 if len(spec.shape) > 1 or spec.name.endswith(".bias") else -1
