"""How many allocations of the trainer's GPUs an engine rank opens: `python -m benchmark.opens`.

For the recorded loaders of real models (`benchmark/gpu/recorded`). The shards of each trainer rank are placed as
torch's allocator places them if it is asked in the layout's order. No GPU is needed.
"""

from __future__ import annotations

import math
import re

import numpy as np

from benchmark import pages
from benchmark.gpu import recording
from benchmark.gpu.recording import Recording
from benchmark.results import Row
from sglang_reshard.cli.plan.sizing import segments
from sglang_reshard.plan import TensorIndex

_HOST = "host"
_EXPERT = re.compile(r"experts\.\d+\.(gate|up|down)_proj")


def opens_of(found: Recording) -> Row:
    """Returns how many allocations an engine rank reads, and how many the trainer ranks have that it reads from."""
    index = TensorIndex.of(found.layout)
    plan = found.read_plan(index, _HOST)
    shapes = [found.layout.min_local_shapes(rank) for rank in range(found.layout.trainer_ranks)]
    item_bytes = [tensor.spec.item_bytes for tensor in found.layout.tensors]
    all_of_them = read = 0
    for rank in plan.traffic():
        sizes = (0 if s is None else math.prod(s) * n for s, n in zip(shapes[rank], item_bytes, strict=True))
        of_tensor = np.fromiter(segments(sizes), np.int64)
        own = plan.reads_from(rank)
        tensors = np.unique(plan.tensor_ids[plan.copy_ids[own.start : own.stop]])
        all_of_them += int(of_tensor.max()) + 1
        read += len(np.unique(of_tensor[tensors]))
    return {
        "case": f"{_name(found)} to {found.target}, engine rank {found.engine_rank}",
        "tensors": len(found.layout.tensors),
        "trainer_ranks": len(plan.traffic()),
        "allocations": all_of_them,
        "opened": read,
    }


def stacked(found: Recording) -> Row | None:
    """Returns the same for experts that are stacked in memory, as transformers 5 does, from all trainer ranks.

    Each rank has a part of every stack then. None for a model without experts.
    """
    index, ranks = TensorIndex.of(found.layout), range(found.layout.trainer_ranks)
    if not any(_EXPERT.search(tensor.name) for tensor in found.layout.tensors):
        return None
    all_of_them = 0
    for rank in ranks:
        sizes: dict[str, int] = {}
        for number, (tensor, shape) in enumerate(
            zip(found.layout.tensors, found.layout.min_local_shapes(rank), strict=True)
        ):
            name = _EXPERT.sub(lambda of: "experts." + ("down" if of[1] == "down" else "gate_up"), tensor.name)
            nbytes = 0 if shape is None else math.prod(shape) * index.tensor_class(number).item_bytes
            sizes[name] = sizes.get(name, 0) + nbytes
        all_of_them += max(segments(sizes.values())) + 1
    return {
        "case": f"{_name(found)}, experts stacked",
        "tensors": len(sizes),
        "trainer_ranks": len(ranks),
        "allocations": all_of_them,
        "opened": all_of_them,
    }


def _name(found: Recording) -> str:
    layers = f" ({found.layers} layers)" if found.layers else ""
    return f"{found.model}{layers}, {found.source}"


def main() -> None:
    loaders = [recording.load(path) for path in recording.recorded().values()]
    rows = [opens_of(found) for found in loaders]
    by_model = {found.model: found for found in loaders}
    rows += [row for found in by_model.values() if (row := stacked(found)) is not None]
    pages.publish("opens", "python -m benchmark.opens", rows)


if __name__ == "__main__":
    main()
