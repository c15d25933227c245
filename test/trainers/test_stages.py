"""Trainer ranks that list different tensors: pipeline stages, virtual stages, and experts of expert parallelism."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sglang_reshard.errors import ReshardError
from support.toy import ToyRank, checkpoint
from support.toy_serving import answered, receiver_of
from support.trainer_rows import shown
from support.world import run_world

FP32 = torch.float32
# Of two stages. "embed" is on both, as a tied embedding is; of two virtual stages each, the first has the odd ones.
STAGES = (("embed", "q", "k", "v"), ("gate", "up", "down", "norm", "embed"))
VIRTUAL = (("embed", "k", "up", "norm"), ("q", "v", "gate", "down", "embed"))
EXPERTS = 4


def values(version):
    generator = torch.Generator().manual_seed(50 + version)
    experts = {f"experts.{e}.weight": torch.randn(4, 6, generator=generator) for e in range(EXPERTS)}
    return checkpoint(version, FP32) | experts


class Engine(ToyRank):
    """The toy, and experts of which each engine rank has some whole."""

    def __init__(self, rank, size):
        super().__init__(rank, size, FP32)
        own = EXPERTS // size
        self.first = rank * own
        self.register_parameter("experts", nn.Parameter(torch.full((own, 4, 6), float("nan")), requires_grad=False))

    def load_weights(self, weights):
        rest = []
        for name, loaded in weights:
            if name.startswith("experts."):
                number = int(name.split(".")[1]) - self.first
                if 0 <= number < len(self.experts):
                    self.experts.data[number].copy_(loaded)
            else:
                rest.append((name, loaded))
        super().load_weights(rest)


def stage_tensors(trainer, stages):
    """This rank's: its stage's, sharded over its tensor parallel group; its experts, whole."""
    mesh = init_device_mesh("cpu", (2, trainer.size // 2), mesh_dim_names=("pp", "tp"))
    stage, tp = mesh.get_local_rank("pp"), mesh["tp"]
    found = {}
    for name, tensor in values(0).items():
        part = name.split(".")[0]
        if part == "experts":
            if int(name.split(".")[1]) % trainer.size == trainer.rank:
                found[name] = tensor
        elif part == "norm" and part in stages[stage]:
            found[name] = distribute_tensor(tensor, tp, [Replicate()], src_data_rank=None)
        elif part in stages[stage]:
            found[name] = distribute_tensor(tensor, tp, [Shard(1 if part == "down" else 0)], src_data_rank=None)
    return found


def write(tensors, version):
    for name, tensor in tensors.items():
        whole = values(version)[name]
        if isinstance(tensor, DTensor):
            new = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
            tensor.to_local().copy_(new.to_local())
        else:
            tensor.copy_(whole)


def train(trainer, stages, transport):
    sender = trainer.sender(transport=transport, bucket_bytes=500, timeout_s=90)
    tensors = stage_tensors(trainer, stages)
    told = []
    for version in (1, 2, 3):
        if version == 3 and trainer.rank == 1:  # memory of one rank moves; the others notice nothing
            tensors = {n: t if isinstance(t, DTensor) else t.clone() for n, t in tensors.items()}
        write(tensors, version)
        report = sender.update(tensors.items(), weight_version=str(version), partial=True, verify="full")
        least = sum(rank.least_bytes for rank in report.engine_ranks)
        told.append((sum(rank.received_bytes for rank in report.engine_ranks) / least, "plan" in report.seconds))
    # Rank 0's stage moves some of its layers to the other: everybody learns of it.
    moved = stage_tensors(trainer, (stages[0][:-1], (*stages[1], stages[0][-1])))
    write(moved, 4)
    report = sender.update(moved.items(), weight_version="4", partial=True)
    told.append("plan" in report.seconds)
    return told


def serve(rank, size, requests, *_):
    """Which parameters were not what stock loading makes them, by update."""
    model = Engine(rank, size)
    differing = []
    for request in answered(receiver_of(model), requests):
        stock = Engine(rank, size)
        stock.load_weights(values(int(request.weight_version)).items())
        own = dict(model.named_parameters())
        differing.append([name for name, p in stock.named_parameters() if not torch.equal(own[name], p)])
    return differing


def check(ranks, engines, stages, transport, record_property):
    told, served = run_world(ranks, engines, train, serve, stages, transport)
    assert served == [[[]] * 4] * engines
    for ratios in told:
        assert [ratio for ratio, _ in ratios[:3]] == [1.0] * 3
        assert [planned for _, planned in ratios[:2]] == [True, False]
        assert ratios[3] is True
    kind = "virtual stages" if stages is VIRTUAL else "stages"
    record_property("trainer", shown(f"pipeline {kind}, TP, experts", "DTensors, partial=True", transport, "run", 1.0))


def test_stages_are_put_together(record_property):
    check(4, 2, STAGES, "ipc", record_property)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("ranks", "engines", "stages", "transport"),
    [(4, 4, VIRTUAL, "p2p"), (4, 1, STAGES, "p2p"), (2, 2, VIRTUAL, "ipc"), (4, 2, STAGES, "auto")],
)
def test_stages_are_put_together_by_any_way(ranks, engines, stages, transport, record_property):
    check(ranks, engines, stages, transport, record_property)


def fail(trainer):
    """What each rank is told of: tensors that ranks disagree about, a tensor that cannot be sent, one that none has."""
    sender = trainer.sender(timeout_s=20)
    tensors = stage_tensors(trainer, STAGES)
    write(tensors, 1)
    wrong = {
        "shape": {**tensors, "embed.weight": torch.zeros(3 + trainer.rank, 2)},
        "kind": {**tensors, **({"x": "no tensor"} if trainer.rank == 2 else {})},
        "missing": {n: t for n, t in tensors.items() if n != "experts.1.weight"},
    }
    told = {}
    for what, given in wrong.items():
        with pytest.raises(ReshardError) as error:
            sender.update(given.items(), weight_version=what, partial=True)
        told[what] = str(error.value)
    with pytest.raises(ReshardError) as error:
        sender.update(tensors.items(), weight_version="without")  # forgotten
    told["without"] = str(error.value)
    report = sender.update(tensors.items(), weight_version="1", partial=True)
    return told, report.success


def serve_refusing(rank, size, requests, *_):
    for _ in answered(receiver_of(Engine(rank, size)), requests):
        pass


def test_what_ranks_disagree_about_is_named_on_all_of_them():
    told, _ = run_world(4, 2, fail, serve_refusing)
    for texts, success in told:
        shapes = "embed.weight is float32 (3, 2) on trainer rank 0, but float32 (4, 2) on trainer rank 1"
        assert shapes in texts["shape"]
        assert "trainer rank 2: x is a str, not a torch.Tensor" in texts["kind"]
        assert "experts is not written completely" in texts["missing"]
        assert "trainer ranks disagree" in texts["without"]
        assert "partial=True" in texts["without"]
        assert success
