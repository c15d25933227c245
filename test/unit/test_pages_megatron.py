"""The example's boxes of Megatron-Core parameters, put together, are the checkpoint's tensors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.documents import ROOT

SIZES = {"hidden": 12, "heads": 8, "groups": 4, "head": 3, "mlp": 16, "vocabulary": 13}


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    path = ROOT / "examples" / "http" / "megatron_tensors.py"
    spec = importlib.util.spec_from_file_location("megatron_tensors", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def checkpoint() -> dict[str, torch.Tensor]:
    """One layer, number 3; all elements differ."""
    hidden, heads, groups, head, mlp, vocabulary = SIZES.values()
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads * head, hidden),
        "self_attn.k_proj.weight": (groups * head, hidden),
        "self_attn.v_proj.weight": (groups * head, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    whole, begin = {}, 0.0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        whole[name] = (begin + torch.arange(count)).view(shape)
        begin += count
    return whole


def parameters(whole: dict[str, torch.Tensor], tp: int, place: int) -> dict[str, torch.Tensor]:
    """What a rank of Megatron-Core holds, as Megatron-Core documents its parameters."""
    rows = -(-SIZES["vocabulary"] // tp)
    padding = torch.full((rows * tp - SIZES["vocabulary"], SIZES["hidden"]), -1.0)

    def of(name: str, dim: int = 0) -> torch.Tensor:
        return whole[name].chunk(tp, dim)[place]

    def padded(name: str) -> torch.Tensor:
        return torch.cat([whole[name], padding])[place * rows : (place + 1) * rows]

    q, k, v = (whole[f"self_attn.{kind}_proj.weight"].chunk(SIZES["groups"]) for kind in "qkv")
    groups = [torch.cat(group) for group in zip(q, k, v, strict=True)]
    layer = "decoder.layers.1."
    return {
        "embedding.word_embeddings.weight": padded("model.embed_tokens.weight"),
        "output_layer.weight": padded("lm_head.weight"),
        "decoder.final_layernorm.weight": whole["model.norm.weight"],
        f"{layer}self_attention.linear_qkv.weight": torch.cat(groups).chunk(tp)[place],
        f"{layer}self_attention.linear_proj.weight": of("self_attn.o_proj.weight", 1),
        f"{layer}self_attention.q_layernorm.weight": whole["self_attn.q_norm.weight"],
        f"{layer}self_attention.k_layernorm.weight": whole["self_attn.k_norm.weight"],
        f"{layer}mlp.linear_fc1.weight": torch.cat([of("mlp.gate_proj.weight"), of("mlp.up_proj.weight")]),
        f"{layer}mlp.linear_fc2.weight": of("mlp.down_proj.weight", 1),
        f"{layer}input_layernorm.weight": whole["input_layernorm.weight"],
        f"{layer}pre_mlp_layernorm.weight": whole["post_attention_layernorm.weight"],
    }


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (2, 3), (0, 1, 2, 3)])
def test_the_boxes_of_all_ranks_are_the_checkpoint(example: Any, ranks: tuple[int, ...]) -> None:
    whole = checkpoint()
    listing = example.MegatronTensors(**SIZES, ranks=ranks)
    held = {rank: parameters(whole, len(ranks), place) for place, rank in enumerate(ranks)}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in held[ranks[0]].items():
        for told, tensor, sharding in listing.of(name, parameter, first_layer=2):
            assert tensor is parameter, "nothing is copied"
            assert told not in found
            together = found[told] = torch.full(sharding.shape, torch.nan)
            for shard in sharding.shard_map.shards:
                for rank in shard.ranks:
                    own = tuple(slice(a, a + n) for a, n in zip(shard.local_start, shard.box.shape, strict=True))
                    together[shard.box.slices()] = held[rank][name][own]
    layer = {name for name in whole if name.startswith(("self_attn", "mlp", "input", "post"))}
    assert found.keys() == {f"model.layers.3.{name}" if name in layer else name for name in whole}
    for name, tensor in found.items():
        assert torch.equal(tensor, whole[name.removeprefix("model.layers.3.")]), name


def test_a_parameter_that_is_not_known_is_named(example: Any) -> None:
    listing = example.MegatronTensors(**SIZES, ranks=(0,))
    with pytest.raises(KeyError, match=r"mlp\.router\.weight"):
        list(listing.of("decoder.layers.0.mlp.router.weight", torch.zeros(2, 12)))
