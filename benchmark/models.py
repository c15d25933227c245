"""Models by their shapes: the config that an engine starts from, and the names and shapes of the checkpoint.

No checkpoint is needed: engines start on dummy weights, and the trainer makes up its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = 2  # bfloat16, on both sides

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Qwen3:
    """A Qwen3; with `experts`, a Qwen3-MoE whose `inner` is the width of one expert. Widths are in elements."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    tied: bool = True

    @property
    def tensors(self) -> int:
        return len(self.shapes())

    @property
    def bytes(self) -> int:
        return ITEM_BYTES * sum(map(math.prod, self.shapes().values()))

    def shapes(self) -> Shapes:
        """Checkpoint name -> shape."""
        head = {} if self.tied else {"lm_head.weight": (self.vocabulary, self.hidden)}
        return {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            **{f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in self._layer().items()},
            "model.norm.weight": (self.hidden,),
            **head,
        }

    def _layer(self) -> Shapes:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (queries, self.hidden),
            "self_attn.k_proj.weight": (keys, self.hidden),
            "self_attn.v_proj.weight": (keys, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            **self._feed_forward(),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }

    def _feed_forward(self) -> Shapes:
        wide = {
            "gate_proj.weight": (self.inner, self.hidden),
            "up_proj.weight": (self.inner, self.hidden),
            "down_proj.weight": (self.hidden, self.inner),
        }
        if not self.experts:
            return {f"mlp.{name}": shape for name, shape in wide.items()}
        routed = {f"mlp.experts.{e}.{name}": shape for e in range(self.experts) for name, shape in wide.items()}
        return {"mlp.gate.weight": (self.experts, self.hidden), **routed}

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        common = {
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": self.tied,
            "eos_token_id": 0,
        }
        if not self.experts:
            return common | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        return common | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": self.inner,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
