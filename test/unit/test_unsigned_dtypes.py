"""uint16, uint32 and uint64 arrive bit for bit: updates of every kind, snapshots, moves. They are never cast."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sglang_reshard import Snapshots, reshard
from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.program import check_cast
from support.sweep import sweep
from support.toy_serving import answered, receiver_of
from support.world import run_world

DTYPES = (torch.uint16, torch.uint32, torch.uint64)
SHAPE = (302, 6)
TRAINERS, ENGINES, VERSIONS = 2, 2, 3


def whole(dtype, version):
    """All bits of an element occur; versions differ in a few elements."""
    size = torch.Size(SHAPE).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(dtype.itemsize))
    raw[version * dtype.itemsize :: 997] += version
    return raw.view(dtype).view(SHAPE)


class Engine(nn.Module):
    """Rows of each tensor in one parameter per dtype."""

    def __init__(self, rank, size):
        super().__init__()
        self.rank, self.size = rank, size
        for dtype in DTYPES:
            rows = -(-SHAPE[0] // size)
            zeros = torch.zeros(rows, SHAPE[1], dtype=dtype)
            self.register_parameter(str(dtype)[6:], nn.Parameter(zeros, requires_grad=False))

    def part(self, tensor):
        rows = -(-SHAPE[0] // self.size)
        return tensor[self.rank * rows : (self.rank + 1) * rows]

    def load_weights(self, weights):
        for name, tensor in weights:
            part = self.part(tensor)
            getattr(self, name).data[: len(part)].copy_(part)


def train(trainer, transport, delta, folder):
    sender = trainer.sender(timeout_s=60, transport=transport, delta=delta, bucket_bytes=4096)
    mesh = init_device_mesh("cpu", (trainer.size,))
    held = {d: distribute_tensor(whole(d, 0), mesh, [Shard(0)], src_data_rank=None) for d in DTYPES}
    reports = []
    for version in range(VERSIONS):
        for dtype, tensor in held.items():
            new = distribute_tensor(whole(dtype, version), mesh, [Shard(0)], src_data_rank=None)
            tensor.to_local().view(torch.uint8).copy_(new.to_local().view(torch.uint8))
        named = [(str(dtype)[6:], tensor) for dtype, tensor in held.items()]
        reports.append(sender.update(named, weight_version=str(version), verify="full"))
    Snapshots(sender, folder).write(named, "last")
    targets = {d: distribute_tensor(torch.zeros(SHAPE, dtype=d), mesh, [Shard(1)], src_data_rank=None) for d in DTYPES}
    reshard(named, [(str(dtype)[6:], tensor) for dtype, tensor in targets.items()])
    expected = {d: whole(d, VERSIONS - 1).chunk(trainer.size, 1)[trainer.rank] for d in DTYPES}
    moved = all(same(tensor.to_local(), expected[d]) for d, tensor in targets.items())
    return [report.delta for report in reports], moved


def serve(rank, size, requests, transport, delta, folder):
    engine = Engine(rank, size)
    seen = []
    for version, _ in enumerate(answered(receiver_of(engine), requests)):
        parts = [(getattr(engine, str(d)[6:]), engine.part(whole(d, version))) for d in DTYPES]
        seen.append(all(same(live[: len(part)], part) for live, part in parts))
    return seen


def same(a, b):
    return torch.equal(a.detach().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("transport", "delta"), [("p2p", "auto"), ("ipc", "off"), sweep("p2p", "off"), sweep("broadcast", "off")]
)
def test_they_are_moved_as_bits(transport, delta, tmp_path):
    told, seen = run_world(TRAINERS, ENGINES, train, serve, transport, delta, str(tmp_path))
    assert seen == [[True] * VERSIONS] * ENGINES
    assert told == [([False, delta == "auto", delta == "auto"], True)] * TRAINERS
    from safetensors.torch import load_file

    loaded = {}
    for file in (tmp_path / "last").glob("*.safetensors"):
        loaded.update(load_file(file))
    assert loaded.keys() == {str(d)[6:] for d in DTYPES}
    assert all(same(loaded[str(d)[6:]], whole(d, VERSIONS - 1)) for d in DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_they_are_not_cast(dtype, other):
    for have, want in ((dtype, other), (other, dtype)):
        with pytest.raises(Unsupported, match=r"w is .* would not preserve the values"):
            check_cast("w", have, "live", want)
