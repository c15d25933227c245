"""All trainer ranks learn of a NaN or infinity that one of them holds, before any of them sends."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import first_not_finite
from support.refusals import refusal_of
from support.world import run_world

NAN = float("nan")
TOLD = "trainer rank 1: 1 of the 12 elements of w on this rank are not finite (1 NaN), the first at global index (3, 2)"


def look(trainer):
    mesh = init_device_mesh("cpu", (trainer.size,))
    w = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
    found = [first_not_finite([("w", w)])]
    with torch.no_grad():
        w.to_local()[1 if trainer.rank == 1 else 0, 2] = NAN if trainer.rank == 1 else 1.0
    found.append(first_not_finite({"w": w}, trainer.group))
    found.append(first_not_finite(iter([("w", w)] if trainer.rank == 1 else [("own", torch.ones(3))])))
    given = [("w", torch.zeros(2, device="meta") if trainer.rank == 1 else torch.zeros(2))]
    return found, refusal_of(lambda: first_not_finite(given))


def test_every_rank_is_told_what_one_of_them_has_found():
    (first, second), _ = run_world(2, 0, look, look)
    assert first == second
    found, refusal = first
    assert found == [None, TOLD, TOLD]
    assert refusal[0] == "Unsupported"
    assert "trainer rank 1" in refusal[1]
