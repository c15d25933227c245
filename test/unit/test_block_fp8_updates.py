"""Whole updates in real processes of a block-fp8 model from a trainer in bfloat16: every transport, staged or not."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmark import block_fp8
from sglang_reshard.cli.plan.rank_model import place
from sglang_reshard.landings.base import Landing
from sglang_reshard.routes.base import Reads
from sglang_reshard.trace.block_formats import quantize_blocks
from support.nixl_env import needs_nixl, use_nixl
from support.sweep import sweep
from support.toy_serving import answered, receiver_of
from support.world import run_world
from toy_loader import BlockFp8Linear

BLOCK = (4, 4)
ROWS, COLUMNS, LAYERS, TRAINERS, ENGINES = 24, 10, 40, 3, 2
BUCKET_BYTES = 2048  # less than a quarter of what a rank quantizes


def weights(version):
    generator = torch.Generator().manual_seed(version)
    named = {f"layers.{n}.weight": torch.randn(ROWS, COLUMNS, generator=generator) for n in range(LAYERS)}
    return {name: tensor.bfloat16() for name, tensor in named.items()} | {"norm": torch.full((4,), float(version))}


class Rank(torch.nn.Module):
    """An engine rank that has its part of the rows of each layer."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.layers = torch.nn.ModuleList(BlockFp8Linear(ROWS // ENGINES, COLUMNS) for _ in range(LAYERS))
        self.norm = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            parameter = self.get_parameter(name).data
            part = tensor if name == "norm" else tensor.chunk(ENGINES)[self.rank]
            parameter.copy_(part)


def train(trainer, transport, options, updates=3):
    use_nixl()
    sender = trainer.sender(transport=transport, bucket_bytes=BUCKET_BYTES)
    mesh = init_device_mesh("cpu", (TRAINERS,))
    reports = []
    for version in range(1, updates + 1):
        shards = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in weights(version).items()}
        reports.append(sender.update(shards.items(), weight_version=str(version), **options))
    return reports


def forecast(transfer, rank):
    target = transfer.target
    landing = Landing(target.program).converting(torch.device("meta"), BUCKET_BYTES)
    reads = Reads(rank, torch.device("meta"), target.tensor_index, target.read_plan, landing, {})
    place(reads, transfer.strategy, transfer.strategy.senders(rank))
    return landing.nbytes


def serve(rank, size, requests, _transport, _options):
    use_nixl()
    model = Rank(rank)
    receiver, differing = receiver_of(model, rank, size), []
    for version, _ in enumerate(answered(receiver, requests), start=1):
        landing = receiver._executor.transfer.landing
        assert landing.turns > 3
        nbytes = landing.nbytes - landing.staged_bytes
        assert nbytes < ROWS // ENGINES * COLUMNS * 2 * LAYERS / 2
        assert nbytes == forecast(receiver._executor.transfer, rank)
        checkpoint = {}
        for name, tensor in weights(version).items():
            checkpoint[name] = tensor
            if tensor.dim() == 2:
                quantized, scales = quantize_blocks(tensor[None], BLOCK)
                checkpoint |= {name: quantized[0], f"{name}_scale_inv": scales[0]}
        stock = Rank(rank)
        stock.load_weights(checkpoint.items())
        for name, right in stock.named_parameters():
            if not torch.equal(model.get_parameter(name).view(torch.uint8), right.view(torch.uint8)):
                differing.append((version, name))
    return differing


@pytest.mark.parametrize("options", [{"verify": "full"}, sweep({"staged": True, "verify": "sample"})], ids=str)
@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast", pytest.param("nixl", marks=needs_nixl)])
def test_engine_ranks_hold_what_a_quantized_checkpoint_leaves(transport, options):
    reports, differing = run_world(TRAINERS, ENGINES, train, serve, transport, options)
    assert differing == [[]] * ENGINES
    for report in reports[0]:
        assert report.transport == transport
        if transport != "broadcast":
            assert all(rank.received_bytes == rank.least_bytes for rank in report.engine_ranks)


@pytest.mark.sweep
def test_the_benchmark_runs() -> None:
    rows = {row["way"]: row for row in block_fp8.run(block_fp8.Size(256, 512, 2, updates=1, verl_updates=1))}
    assert set(rows) == {"ipc", "p2p", "verl"}
    assert all(row["bit_exact"] for row in rows.values()), "with verl's own"
