"""DeepSeek-V3 671B as shapes: its checkpoint's tensors, and what each engine rank's loader copies.

The numbers are those of the model's published config.json. Engine ranks are laid out as SGLang lays them out:
attention and dense layers split over all of them, each expert over `tp // ep` of them. Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_reshard.layout.regions import Region
from sglang_reshard.layout.source_layout import Mesh, Placement, SourceLayout, SourceTensor
from sglang_reshard.trace.program import Copy

HIDDEN, VOCAB, LAYERS, DENSE_LAYERS = 7168, 129280, 61, 3
INTER, EXPERT_INTER, EXPERTS = 18432, 2048, 256
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 128, 1536, 512, 128, 64, 128
BLOCK = 128  # of the fp8 weights that share a scale, in both dimensions


@dataclass(frozen=True, slots=True)
class Weight:
    """A checkpoint tensor and how engine ranks take it.

    dim     the dimension that they split; None when every rank takes it whole
    expert  of which expert; -1 for none
    live    name of the live tensor
    after   checkpoint shapes that land before it in the same live tensor
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dim: int | None
    live: str
    after: tuple[tuple[int, ...], ...] = ()
    expert: int = -1


def _quantized(
    name: str, rows: int, cols: int, dim: int | None, live: str, before: int = 0, expert: int = -1
) -> Iterator[Weight]:
    """An fp8 weight of [rows, cols] and its scales; `before` rows land ahead of it in the live tensor."""
    for suffix, block, dtype in (("weight", 1, "float8_e4m3fn"), ("weight_scale_inv", BLOCK, "float32")):
        shape = -(-rows // block), -(-cols // block)
        after = ((-(-before // block), shape[1]),) if before else ()
        yield Weight(f"{name}.{suffix}", shape, dtype, dim, f"{live}.{suffix}", after, expert)


def _mlp(prefix: str, inter: int, live: str, expert: int = -1) -> Iterator[Weight]:
    yield from _quantized(f"{prefix}.gate_proj", inter, HIDDEN, 0, f"{live}.w13", expert=expert)
    yield from _quantized(f"{prefix}.up_proj", inter, HIDDEN, 0, f"{live}.w13", before=inter, expert=expert)
    yield from _quantized(f"{prefix}.down_proj", HIDDEN, inter, 1, f"{live}.w2", expert=expert)


def weights() -> Iterator[Weight]:
    """All checkpoint tensors, in order."""
    yield Weight("model.embed_tokens.weight", (VOCAB, HIDDEN), "bfloat16", 0, "embed")
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        kv_rows = KV_RANK + ROPE
        yield from _quantized(f"{at}.self_attn.q_a_proj", Q_RANK, HIDDEN, None, f"{at}.qkv_a")
        yield Weight(f"{at}.self_attn.q_a_layernorm.weight", (Q_RANK,), "bfloat16", None, f"{at}.q_a_norm")
        yield from _quantized(f"{at}.self_attn.q_b_proj", HEADS * (NOPE + ROPE), Q_RANK, 0, f"{at}.q_b")
        yield from _quantized(f"{at}.self_attn.kv_a_proj_with_mqa", kv_rows, HIDDEN, None, f"{at}.qkv_a", before=Q_RANK)
        yield Weight(f"{at}.self_attn.kv_a_layernorm.weight", (KV_RANK,), "bfloat16", None, f"{at}.kv_a_norm")
        yield from _quantized(f"{at}.self_attn.kv_b_proj", HEADS * (NOPE + VALUE), KV_RANK, 0, f"{at}.kv_b")
        yield from _quantized(f"{at}.self_attn.o_proj", HIDDEN, HEADS * VALUE, 1, f"{at}.o")
        if i < DENSE_LAYERS:
            yield from _mlp(f"{at}.mlp", INTER, f"{at}.mlp")
        else:
            yield Weight(f"{at}.mlp.gate.weight", (EXPERTS, HIDDEN), "bfloat16", None, f"{at}.gate")
            yield Weight(f"{at}.mlp.gate.e_score_correction_bias", (EXPERTS,), "float32", None, f"{at}.bias")
            yield from _mlp(f"{at}.mlp.shared_experts", EXPERT_INTER, f"{at}.shared")
            for expert in range(EXPERTS):
                yield from _mlp(f"{at}.mlp.experts.{expert}", EXPERT_INTER, f"{at}.experts", expert)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield Weight(f"{at}.{norm}.weight", (HIDDEN,), "bfloat16", None, f"{at}.{norm}")
    yield Weight("model.norm.weight", (HIDDEN,), "bfloat16", None, "norm")
    yield Weight("lm_head.weight", (VOCAB, HIDDEN), "bfloat16", 0, "head")


def fsdp_layout(trainer_ranks: int) -> SourceLayout:
    """The checkpoint, every tensor split over all trainer ranks along dimension 0, as FSDP2 does."""
    mesh = Mesh((trainer_ranks,), tuple(range(trainer_ranks)))
    tensors = tuple(SourceTensor(w.name, w.shape, w.dtype, 0, 0) for w in weights())
    return SourceLayout(trainer_ranks, (mesh,), ((Placement(0),),), tensors)


def copies(engine_rank: int, tp: int, ep: int) -> list[Copy]:
    """What the loader of one of `tp` engine ranks copies, with experts over `ep` of them."""
    per_rank, over = EXPERTS // ep, tp // ep
    found = []
    for w in weights():
        part, parts = engine_rank, tp
        if w.expert >= 0:
            if w.expert // per_rank != engine_rank // over:
                continue
            part, parts = engine_rank % over, over
        elif "shared_experts" in w.name and EXPERT_INTER % (tp * BLOCK):
            part, parts = 0, 1  # blocks of 128 do not split over 32 ranks: whole on each
        found.append(_copy(w, part, parts, w.expert % per_rank))
    return found


def _copy(w: Weight, part: int, parts: int, slot: int) -> Copy:
    """The part of a tensor; in a live tensor, fused parts land one after the other, expert after expert."""
    split = 1 if w.dim is None else parts
    count = tuple(-(-n // split) if d == w.dim else n for d, n in enumerate(w.shape))
    start = tuple(part * c if d == w.dim else 0 for d, c in enumerate(count))
    count = tuple(min(c, n - a) for a, c, n in zip(start, count, w.shape, strict=True))
    strides = (1,) if len(count) == 1 else (count[1], 1)
    before = sum(rows // split * cols for rows, cols in w.after)
    whole = (2 if w.live.endswith(("w13.weight", "w13.weight_scale_inv")) else 1) * count[0] * strides[0]
    offset = before + (slot * whole if w.expert >= 0 else 0)
    return Copy(w.name, Region(start, count, (1,) * len(count)), w.live, offset, strides)
