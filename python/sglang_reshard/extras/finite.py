"""Finds NaN and infinity in the trainer's own tensors, before they are sent.

    if found := first_not_finite(model):          # on every trainer rank, with the same answer on all of them
        raise RuntimeError(found)
    sender.update(model, weight_version="42")

An update sends values as they are, and looks at none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from sglang_reshard.layout.regions import Box, LocalRegion, split
from sglang_reshard.layout.source_layout import SourceLayout
from sglang_reshard.plan import TensorIndex
from sglang_reshard.sources import NamedTensors, describe
from sglang_reshard.trainer.collectives import gather, require_cpu_backend

CHUNK = 1 << 18  # elements that are copied at a time where a copy is needed: 1 MiB of float32


def first_not_finite(
    named_tensors: NamedTensors | torch.nn.Module, group: dist.ProcessGroup | None = None
) -> str | None:
    """Returns a message about the first tensor with a NaN or infinity; None if none has. Collective over `group`.

    named_tensors  as `WeightSender.update` takes them. Ranks may list different ones
    group          process group of the trainer ranks, with a CPU backend; by default all ranks. Without
                   torch.distributed there is one rank

    Returns the same on every rank: what the first rank has found that has found anything. The message names the trainer
    rank and the tensor, and has the number of such elements on that rank and the global index of the first. Every
    element that a rank holds is read once, and nothing is copied but chunks of at most 2 MiB where no view will do.

    Raises Unsupported and Mismatch, on every rank, as `sources.describe` does on one.
    """
    group = group or (dist.group.WORLD if dist.is_initialized() else None)
    rank, ranks = (0, (0,)) if group is None else (dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))

    def find() -> str:
        state = describe(named_tensors, trainer_rank=rank, global_ranks=ranks, partial=True)
        return not_finite(state.layout, state.shards, rank) or ""

    if group is None:
        return find() or None
    require_cpu_backend(group)
    return next(filter(None, gather(find, str, group)), None)


def not_finite(layout: SourceLayout, local_tensors: Sequence[torch.Tensor], trainer_rank: int) -> str | None:
    """Returns an error message for the first tensor with a NaN or infinity among this rank's shards; None if none has.

    The message has the tensor's name, the number of such elements on this rank, and the global index of the first.
    Every element of the rank's shards is read once, and the device is synchronized once. Temporaries have at most CHUNK
    elements (4 bytes each, 8 for float64). Integers and booleans are always finite.
    """
    index = TensorIndex.of(layout)
    held = [tensor_class.shard_map.held_by(trainer_rank) for tensor_class in index.classes]
    extremes: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for i, local in enumerate(local_tensors):
        if local.is_floating_point():
            for _, region in held[index.class_of[i]]:
                for chunk in _reducible(region.view(local)):
                    both = torch.stack(torch.aminmax(chunk))  # a NaN becomes both, an infinity one of them
                    extremes.setdefault(local.device, []).append((i, both.to(torch.float64)))
    bad = []
    for of_device in extremes.values():
        finite = torch.stack([both for _, both in of_device]).isfinite().all(dim=1).tolist()
        bad += [i for (i, _), good in zip(of_device, finite, strict=True) if not good]
    if not bad:
        return None
    first = min(bad)
    return _message(layout.tensors[first].name, held[index.class_of[first]], local_tensors[first], trainer_rank)


def _chunks(values: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yields (box, elements) in row-major order, at most CHUNK elements at a time."""
    if values.numel():
        for box in split(Box.whole(tuple(values.shape)), CHUNK):
            yield box, values[box.slices()]


def _reducible(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields tensors that `aminmax` reads without a large copy: a contiguous tensor as it is, others in chunks."""
    if values.element_size() > 1 and values.is_contiguous():
        if values.numel():
            yield values
        return
    for _, chunk in _chunks(values):
        # Reductions do not support 8-bit floats, and copy non-contiguous tensors.
        yield chunk.float() if chunk.element_size() == 1 else chunk.contiguous()


def _message(name: str, shards: Sequence[tuple[Box, LocalRegion]], local: torch.Tensor, trainer_rank: int) -> str:
    elements = nans = infinities = 0
    firsts: list[tuple[int, ...]] = []
    for held, region in shards:
        for box, chunk in _chunks(region.view(local)):
            values = chunk.float() if chunk.element_size() == 1 else chunk
            nan, infinite = values.isnan(), values.isinf()
            if bool((nan | infinite).any()):
                position = int((nan | infinite).flatten().to(torch.uint8).argmax())
                index = map(int, np.unravel_index(position, box.shape))
                firsts.append(tuple(map(sum, zip(held.start, box.start, index, strict=True))))
            elements, nans, infinities = elements + box.numel, nans + int(nan.sum()), infinities + int(infinite.sum())
    counts = [f"{n} {kind}" for n, kind in ((nans, "NaN"), (infinities, "infinite")) if n]
    return (
        f"trainer rank {trainer_rank}: {nans + infinities} of the {elements} elements of {name} on this rank are not "
        f"finite ({', '.join(counts)}), the first at global index {min(firsts)}"
    )
