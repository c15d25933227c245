"""The sharded parameters of FSDP2 modules are read in any state of the module, never the unsharded copies."""

import gc
import sys
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from sglang_reshard.sources import describe, named_shards, tied_names
from support.refusals import refusal_of
from support.world import run_world

TOKENS = torch.arange(6).view(2, 3)


class Block(nn.Module):
    """A small model without anything even about it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 6)
        self.down = nn.Linear(6, 8)
        self.experts = nn.Parameter(torch.randn(2, 4, 5))  # [expert, a, b]
        self.gate = nn.Parameter(torch.randn(1))  # one element: all ranks but one have none
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.gate * self.down(torch.relu(self.up(x)))
        return self.norm(x) * self.experts.sum()


def make(kind):
    """A model under FSDP2 of some kind."""
    model = Block()
    options = {}
    if kind == "mixed precision":
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if kind == "offloaded":
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    if kind == "resharded to a smaller mesh":
        options = {"reshard_after_forward": 2}
    if kind == "hsdp":
        options = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    if kind == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        options = {"mesh": mesh["dp"]}
    fully_shard(model.down, **options)
    fully_shard(model, **options)
    return model


def described(trainer, named_tensors):
    return describe(named_tensors, trainer_rank=trainer.rank, global_ranks=tuple(range(trainer.size)))


def same_memory(state, other):
    return [s.data_ptr() for s in state.shards] == [s.data_ptr() for s in other.shards]


def follow(trainer, kinds):
    """Returns what differs from the state before any forward, at each point of two training steps."""
    wrong = []
    for kind in kinds:
        model = make(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        before = described(trainer, model.named_parameters())

        def check(moment, model=model, before=before, kind=kind):
            ways = {
                "named_parameters": lambda: model.named_parameters(),
                "detached": lambda: ((n, p.detach()) for n, p in model.named_parameters()),
                "named_shards": lambda: named_shards(model),
                "the module": lambda: model,
            }
            for way, named in ways.items():
                registered = [id(p) for p in model.parameters()]
                state = described(trainer, named())
                if state.layout != before.layout or not same_memory(state, before):
                    wrong.append((kind, moment, way))
                if [id(p) for p in model.parameters()] != registered:
                    wrong.append((kind, moment, way, "the module was changed"))

        unsharded = [0]
        model.norm.register_forward_hook(lambda *_, check=check: check("in the forward"))
        for _ in range(2):
            loss = model(TOKENS).sum()
            # Of a tensor-parallel model the copies are DTensors, too, but on a smaller mesh.
            registered = dict(model.named_parameters())
            stale = [n for n, p in named_shards(model) if p is not registered[n]]
            unsharded.append(len(stale))
            check("after the forward")
            loss.backward()
            check("after the backward")
            optimizer.step()
            check("after the step")
            optimizer.zero_grad()
        with torch.no_grad():
            model(TOKENS)
        for _, sharded in named_shards(model):
            sharded._local_tensor.add_(1)
        check("after an evaluation and a step")
        if max(unsharded) == 0:
            wrong.append((kind, "nothing was ever unsharded, so nothing was tested"))
    return wrong


def test_every_moment_of_training_describes_the_sharded_parameters():
    kinds = ["plain", "mixed precision", "offloaded", "resharded to a smaller mesh", "hsdp", "tp"]
    results, _ = run_world(4, 0, follow, None, kinds)
    assert results == [[]] * 4


def give_odd_things(trainer):
    """Views of copies, copies that were freed, the same address in use again, models that are gone."""
    told = []
    model = Block()
    fully_shard(model)
    model(TOKENS)
    told.append(refusal_of(partial(described, trainer, [("experts.0", model.experts[0])]))[1])
    copies = dict(model.named_parameters())
    views = {name: copy.detach() for name, copy in copies.items()}
    model.reshard()
    state = described(trainer, copies.items())  # the objects are still known
    told.append(state.layout == described(trainer, model.named_parameters()).layout)
    told.append(refusal_of(partial(described, trainer, views.items()))[1])

    model.unshard()
    mine = {"mine": torch.ones(11, 8)}
    told.append(described(trainer, mine.items()).shards[0].data_ptr() == mine["mine"].data_ptr())
    del model, copies, views, state
    gc.collect()
    told.append(described(trainer, mine.items()).shards[0].data_ptr() == mine["mine"].data_ptr())
    return told


def test_views_of_copies_and_freed_copies_are_refused_by_name():
    results, _ = run_world(2, 0, give_odd_things, None)
    for rank, (view, known, freed, mine, after) in enumerate(results):
        assert f"trainer rank {rank}: experts.0 is a view of FSDP2's unsharded copy" in view
        assert "named_shards(model)" in view
        assert f"trainer rank {rank}: " in freed
        assert "freed" in freed
        assert (known, mine, after) == (True, True, True)


class Tied(nn.Module):
    """Tied weights, buffers of both kinds, and a frozen parameter that is not sharded."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm.register_buffer("bias_correction", torch.ones(4))
        self.norm.register_buffer("inv_freq", torch.ones(2), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)) * self.norm.bias_correction)


def tied(trainer):
    model = Tied()
    fully_shard(model)
    names = []
    for _ in range(2):
        names.append([name for name, _ in named_shards(model)])
        state = described(trainer, model.state_dict().items())  # lists both names of tied weights
        names.append(tied_names(state.layout, state.shards))
        model(TOKENS)
    assert model.head.weight is model.embed.weight
    assert not isinstance(model.head.weight, DTensor)
    both = described(trainer, [("embed.weight", model.embed.weight), ("head.weight", model.head.weight)])
    names.append(tied_names(both.layout, both.shards))
    with_buffer = described(trainer, named_shards(model)).layout
    names.append(with_buffer.placements[with_buffer.tensors[-1].placements][0].dim)
    return names


def test_tied_weights_come_once_and_persistent_buffers_come_along():
    results, _ = run_world(2, 0, tied, None)
    names = ["embed.weight", "norm.weight", "norm.bias", "norm.bias_correction"]
    same = {"head.weight": "embed.weight"}
    assert results == [[names, same, names, same, same, -1]] * 2


def test_modules_without_sharding_are_read_as_they_are():
    assert [type(t).__name__ for _, t in named_shards(Tied())] == ["Parameter", "Parameter", "Parameter", "Tensor"]


def with_a_torch_that_keeps_it_elsewhere(trainer):
    model = Block()
    fully_shard(model)
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    class Elsewhere(FSDPState):
        def __init__(self):
            pass

    model._get_fsdp_state = Elsewhere
    return refusal_of(lambda: list(named_shards(model)))[1]


def test_a_torch_that_keeps_its_state_elsewhere_is_named_with_the_cure():
    (told,), _ = run_world(1, 0, with_a_torch_that_keeps_it_elsewhere, None)
    assert told.startswith(f"named_shards does not support torch {torch.__version__}: FSDP2 keeps its sharded")
    assert "reshard()" in told


def test_a_process_without_fsdp_imports_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    state = describe([("w", torch.ones(2))], trainer_rank=0, global_ranks=(0,))
    assert state.shards[0].tolist() == [1.0, 1.0]
