"""Megatron-Bridge's adapters: the shards of all tensor parallel ranks are PEFT's tensors; others are refused."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.sources import megatron_adapter_config, megatron_adapter_tensors

HIDDEN, HEADS, GROUPS, HEAD, MLP, RANK = 6, 8, 2, 4, 20, 8
QKV, PROJ, FC1, FC2 = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
CONFIG = SimpleNamespace(num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=HEAD, gated_linear_unit=True)
SIZES = {  # of PEFT's tensors: input and output features
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD),
    "self_attn.k_proj": (HIDDEN, GROUPS * HEAD),
    "self_attn.v_proj": (HIDDEN, GROUPS * HEAD),
    "self_attn.o_proj": (HEADS * HEAD, HIDDEN + 2),
    "mlp.gate_proj": (HIDDEN, MLP),
    "mlp.up_proj": (HIDDEN, MLP),
    "mlp.down_proj": (MLP, HIDDEN + 2),
}


class Linear(nn.Module):
    def __init__(self, weight, rank, size):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.tp_group = SimpleNamespace(rank=lambda: rank, size=lambda: size)


def add(model, name, module):
    """Adds a module under a dotted name."""
    *owners, last = name.split(".")
    for part in owners:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model._modules[part]
    model.add_module(last, module)


def add_adapter(model, name, inner, outer, by_columns=False, rank=0, size=1, **options):
    """Adds an adapter of a linear layer of decoder layer 0, given its whole matrices."""
    adapter = nn.Module()
    adapter.dim, adapter.alpha, adapter.config = RANK, 16, CONFIG
    adapter.__dict__.update(options)
    adapter.linear_in = Linear(inner.chunk(size, 1 if by_columns else 0)[rank].clone(), rank, size)
    adapter.linear_out = Linear(outer.chunk(size)[rank].clone(), rank, size)
    add(model, f"decoder.layers.0.{name}", adapter)


def stage(layer=4):
    model = nn.Module()
    add(model, "decoder.layers.0", nn.Module())
    model.decoder.layers._modules["0"].layer_number = layer
    return model


def peft_tensors():
    """Of an adapter that LoRA trains: the projections of a layer share lora_A."""
    torch.manual_seed(0)
    of_a = {names: torch.randn(RANK, SIZES[names[0]][0]) for names in SHARED}
    a = {name: matrix for names, matrix in of_a.items() for name in names}
    return {name: (a[name], torch.randn(outputs, RANK)) for name, (_, outputs) in SIZES.items()}


SHARED = [tuple(list(SIZES)[:3]), ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]


def fused_on(rank, size):
    """A tensor parallel rank's part of a model, whose layout is written down here once more, by chunks."""
    tensors, model = peft_tensors(), stage()
    (a, q), (_, k), (_, v) = (tensors[name] for name in SHARED[0])
    groups = zip(q.chunk(GROUPS), k.chunk(GROUPS), v.chunk(GROUPS), strict=True)
    add_adapter(model, f"{QKV}.adapter", a, torch.cat([*itertools.chain(*groups)]), rank=rank, size=size)
    add_adapter(model, f"{PROJ}.adapter", *tensors["self_attn.o_proj"], by_columns=True, rank=rank, size=size)
    (a, gate), (_, up) = (tensors[name] for name in SHARED[2])
    halves = zip(gate.chunk(size), up.chunk(size), strict=True)
    add_adapter(model, f"{FC1}.adapter", a, torch.cat([*itertools.chain(*halves)]), rank=rank, size=size)
    add_adapter(model, f"{FC2}.adapter", *tensors["mlp.down_proj"], by_columns=True, rank=rank, size=size)
    return model


def split_on(rank, size):
    tensors, model = peft_tensors(), stage()
    for name, (a, b) in tensors.items():
        module, one = name.split(".")[1].removesuffix("_proj"), ""
        if module in ("q", "k", "v", "gate", "up"):
            one = f".adapter_{module}"
        owner = {"q": QKV, "k": QKV, "v": QKV, "o": PROJ, "gate": FC1, "up": FC1, "down": FC2}[module]
        add_adapter(model, f"{owner}.adapter{one}", a, b, by_columns=not one, rank=rank, size=size)
    return model


@pytest.mark.parametrize("size", [1, 2, 4])  # at 4, a group's heads are on two ranks
@pytest.mark.parametrize("part", [fused_on, split_on], ids=["LoRA", "CanonicalLoRA"])
def test_the_shards_of_all_ranks_are_pefts_tensors(part, size):
    found = {}
    for rank in range(size):
        for name, tensor, sharding in megatron_adapter_tensors(part(rank, size), trainer_rank=rank):
            whole = found.setdefault(name, torch.full(sharding.shape, float("nan")))
            for shard in sharding.shard_map.shards:
                assert shard.ranks == (rank,)
                inside = tuple(slice(a, a + n) for a, n in zip(shard.local_start, shard.box.shape, strict=True))
                assert whole[shard.box.slices()].isnan().all()
                whole[shard.box.slices()] = tensor.detach()[inside]
    expected = {
        f"base_model.model.model.layers.3.{name}.lora_{matrix}.weight": tensor
        for name, pair in peft_tensors().items()
        for matrix, tensor in zip("AB", pair, strict=True)
    }
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def refused_models():
    plain = torch.ones(RANK, HIDDEN), torch.ones(2 * MLP, RANK)
    experts, norms, gates, mlp, ranks, bent, disabled = (stage() for _ in range(7))
    add_adapter(experts, "mlp.experts.linear_fc1.adapter", *plain)
    add_adapter(norms, f"{FC1}.adapter", *plain)
    add(norms, "decoder.layers.0.self_attention.linear_proj.adapter", nn.Module())
    adapter = norms.get_submodule("decoder.layers.0.self_attention.linear_proj.adapter")
    adapter.weight_magnitude = nn.Parameter(torch.ones(3))
    add_adapter(gates, f"{QKV}.adapter", *plain)
    add_adapter(mlp, f"{FC1}.adapter", *plain, config=SimpleNamespace(gated_linear_unit=False))
    add_adapter(ranks, f"{FC1}.adapter", *plain)
    add_adapter(ranks, f"{FC2}.adapter", *plain, alpha=32)
    add_adapter(bent, f"{FC1}.adapter", *plain, activation=nn.SiLU())
    add_adapter(disabled, f"{FC1}.adapter.adapter_up", *plain, activation=nn.Identity())
    disabled.get_submodule(f"decoder.layers.0.{FC1}")._adapter_enabled = False
    return {
        "activation": (bent, r"linear_fc1\.adapter has a SiLU between linear_in and linear_out"),
        "disabled": (disabled, r"linear_fc1\.adapter\.adapter_up is disabled; call enable_adapter_layers"),
        "experts": (experts, r"mlp\.experts\.linear_fc1\.adapter\.linear_in\.weight: only adapters of linear_qkv"),
        "DoRA": (norms, "weight_magnitude: SGLang does not serve DoRA"),
        "more than qkv": (gates, "linear_out has 40 rows, but 8 heads and 2 groups of 4 have 48"),
        "no gate": (mlp, "the adapted MLP has no gate"),
        "alphas": (ranks, r"linear_fc2\.adapter has dim=8 and alpha=32, but .*linear_fc1\.adapter dim=8 and alpha=16"),
    }


@pytest.mark.parametrize("kind", refused_models())
def test_what_cannot_be_served_is_refused_by_name(kind):
    model, said = refused_models()[kind]
    with pytest.raises(Unsupported, match=said):
        (megatron_adapter_config if kind == "alphas" else megatron_adapter_tensors)(
            model, *([] if kind == "alphas" else [0])
        )


def test_a_model_without_an_adapter_and_a_wrong_rank_are_refused():
    with pytest.raises(Mismatch, match="the model has no adapter"):
        megatron_adapter_tensors(stage(), 0)
    model = stage()
    add_adapter(model, f"{FC1}.adapter", torch.ones(RANK, HIDDEN), torch.ones(2 * MLP, RANK), dim=4)
    with pytest.raises(Mismatch, match="hold 8 rows of linear_in, but the adapter has dim=4"):
        megatron_adapter_tensors(model, 0)
