"""FSDP1 hands over its flat parameters' pieces in place, in any state of the module."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from sglang_reshard.errors import Unsupported
from sglang_reshard.sources import describe, named_shards
from support.partial_states import not_assembled
from support.saved_versions import serve
from support.sweep import only
from support.toy import checkpoint
from support.trainer_rows import shown
from support.world import run_world

CPU = torch.device("cpu")
TOKENS = torch.arange(6).view(2, 3)


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 7), nn.Linear(7, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)
        self.gate = nn.Parameter(torch.randn(1))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.norm(x + self.gate * self.down(torch.relu(self.up(x))))


class Model(nn.Module):
    """Nothing in it is even; the head is tied to the embedding, and the frozen bias is left out of FSDP."""

    def __init__(self, hidden=5):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(2))
        self.head = nn.Linear(hidden, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.frozen.sum()


def group_pair(ranks):
    """Sharded within halves, replicated between them, given as process groups and not as a mesh."""
    half = ranks // 2
    halves = [dist.new_group(list(range(i * half, (i + 1) * half))) for i in range(2)]
    across = [dist.new_group([i, i + half]) for i in range(half)]
    return halves[dist.get_rank() // half], across[dist.get_rank() % half]


NAMES = {
    "full": "FULL_SHARD",
    "grad_op": "SHARD_GRAD_OP",
    "no_shard": "NO_SHARD",
    "hybrid": "HYBRID_SHARD over a mesh",
    "hybrid groups": "HYBRID_SHARD over two groups",
    "submesh": "FULL_SHARD over a submesh",
    "mixed precision": "FULL_SHARD, mixed precision",
}
KINDS = {
    "full": {},
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "hybrid groups": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    "submesh": {},
    "mixed precision": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.float32)},
}


def make(kind, orig, ranks, model=None):
    options = dict(KINDS[kind])
    if kind == "hybrid":
        options["device_mesh"] = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    if kind == "hybrid groups":
        options["process_group"] = group_pair(ranks)
    if kind == "submesh":  # two replicas that FSDP knows nothing of
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", "replicate"))
        options["device_mesh"] = mesh["shard"]
    model = model or Model()
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        use_orig_params=orig,
        device_id=CPU,
        ignored_states=[model.frozen] if hasattr(model, "frozen") else None,
        **options,
    )


def wholes(model):
    """What torch itself gathers."""
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False)):
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    state.pop("head.weight", None)  # tied
    return state


def described(trainer, tensors):
    return describe(tensors, trainer_rank=trainer.rank, global_ranks=tuple(range(trainer.size)))


def pieces(trainer, kind, orig):
    """Reads before the first forward, between a forward and its backward, after a step, and while it is gathered."""
    model = make(kind, orig, trainer.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = described(trainer, model)
    flat = [row for row in named_shards(model) if len(row) > 2]
    found = [not_assembled(first, wholes(model))]
    loss = model(TOKENS).float().square().mean()
    found.append(not_assembled(described(trainer, model), wholes(model)))
    loss.backward()
    optimizer.step()
    stepped = described(trainer, named_shards(model))
    moved = [
        n for n, (a, b) in enumerate(zip(first.shards, stepped.shards, strict=True)) if a.data_ptr() != b.data_ptr()
    ]
    found.append(not_assembled(stepped, wholes(model)))
    with FSDP.summon_full_params(model):
        again = described(trainer, model)
    assert again.layout == first.layout
    known = [row[2] for row in named_shards(model) if len(row) > 2]
    assert len(known) == 3  # two layers, and the rest
    assert all(buffer is row[2] for buffer, row in zip(known, flat, strict=True))
    dtypes = {tensor.dtype for tensor in stepped.layout.tensors}
    return found, moved, dtypes


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("kind", only(KINDS, lambda kind: kind not in ("no_shard", "hybrid")))
def test_pieces_in_place_are_what_torch_gathers(kind, orig):
    ranks = 4 if kind in ("hybrid", "hybrid groups", "submesh") else 3
    told, _ = run_world(ranks, 0, pieces, None, kind, orig)
    assert told == [([[], [], []], [], {"float32"})] * ranks


# -- updates of an engine


class ToyModel(nn.Module):
    """Parameters by the toy checkpoint's names."""

    def __init__(self, dtype):
        super().__init__()
        for name, tensor in checkpoint(0, dtype).items():
            part, _, leaf = name.rpartition(".")
            self.add_module(part, nn.Module())
            getattr(self, part).register_parameter(leaf, nn.Parameter(tensor))

    def forward(self):
        return sum((p.float() * 0.5).square().sum() for p in self.parameters())


VERSIONS = 3


def train(trainer, kind, orig, transport, dtype, folder):
    model = make(kind, orig, trainer.size, ToyModel(dtype))
    sender = trainer.sender(transport=transport, bucket_bytes=500, timeout_s=90)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    told = []
    for version in range(VERSIONS):
        torch.save(wholes(model), f"{folder}/{version}.{trainer.rank}")
        report = sender.update(model, weight_version=f"{folder}/{version}.0", verify="full")
        least = sum(rank.least_bytes for rank in report.engine_ranks)
        told.append((sum(rank.received_bytes for rank in report.engine_ranks) / least, "plan" in report.seconds))
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    return told


def check_updates(ranks, engines, kind, orig, transport, dtype, folder, record_property):
    told, served = run_world(ranks, engines, train, serve, kind, orig, transport, dtype, str(folder))
    assert served == [[[]] * VERSIONS] * engines
    if transport != "broadcast":
        assert told == [[(1.0, True), (1.0, False), (1.0, False)]] * ranks
    way = f"the module, use_orig_params={orig}"
    ratio = max(received for received, _ in told[0])
    record_property("trainer", shown(f"FSDP1, {NAMES[kind]}", way, transport, "run", ratio))


@pytest.mark.parametrize("transport", ["ipc", "p2p"])
def test_an_engine_follows_an_optimizer(transport, tmp_path, record_property):
    check_updates(3, 2, "mixed precision", True, transport, torch.float32, tmp_path, record_property)


@pytest.mark.sweep
@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast"])
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_follows_an_optimizer_by_any_way(kind, orig, transport, tmp_path, record_property):
    ranks = 3 if kind in ("full", "mixed precision") else 4
    check_updates(ranks, 4, kind, orig, transport, torch.bfloat16, tmp_path, record_property)


# -- what is refused


def refusals(trainer):
    model = make("full", True, trainer.size)
    try:
        described(trainer, model.named_parameters())
    except Unsupported as error:
        return str(error)
    return "no error"


def test_a_flattened_parameter_by_itself_is_refused():
    told, _ = run_world(2, 0, refusals, None)
    for rank, text in enumerate(told):
        assert text.startswith(f"trainer rank {rank}: _fsdp_wrapped_module.")
        assert "pass the module itself" in text
