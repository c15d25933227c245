"""Names and boxes of a Megatron-Core model's parameters in a checkpoint of the Llama and Qwen families.

A Megatron parameter holds several checkpoint tensors, or a part of one. `MegatronTensors.of` lists each checkpoint
tensor with the parameter that contains it, and with the box of it that each tensor parallel rank has there. Nothing is
copied: sender and engine ranks read the parameter itself.

    linear_qkv            rows of a group: its queries, its key, its value; then the next group
    linear_fc1            rows of this rank's part of the gate, then of its part of the up projection
    linear_proj, fc2      columns
    embedding, output     rows, padded to a multiple of the tensor parallel size
    norms                 whole on every rank
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_reshard.layout.regions import Box
from sglang_reshard.sources import ExplicitSharding, ShardMap

Listed = tuple[str, torch.Tensor, ExplicitSharding]
_NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


@dataclass(frozen=True)
class MegatronTensors:
    """Sizes of the whole model, in elements, and the trainer ranks of one pipeline stage in tensor parallel order."""

    hidden: int
    heads: int
    groups: int
    head: int
    mlp: int
    vocabulary: int
    ranks: tuple[int, ...]

    def of(self, name: str, parameter: torch.Tensor, first_layer: int = 0) -> Iterator[Listed]:
        """Yields the checkpoint tensors in a parameter of `GPTModel.named_parameters()`.

        first_layer  the number of this pipeline stage's first layer in the whole model
        Raises KeyError for a parameter that it does not know.
        """
        if name == "embedding.word_embeddings.weight":
            yield "model.embed_tokens.weight", parameter, self._rows(self.vocabulary, parameter.shape[0])
        elif name == "output_layer.weight":
            yield "lm_head.weight", parameter, self._rows(self.vocabulary, parameter.shape[0])
        elif name == "decoder.final_layernorm.weight":
            yield "model.norm.weight", parameter, self._whole(parameter)
        else:
            _, _, number, part = name.split(".", 3)
            prefix = f"model.layers.{first_layer + int(number)}."
            for own, tensor, sharding in self._of_layer(part, parameter):
                yield prefix + own, tensor, sharding

    def _of_layer(self, part: str, parameter: torch.Tensor) -> Iterator[Listed]:
        tp = len(self.ranks)
        if part == "self_attention.linear_qkv.weight":
            queries = self.heads // self.groups
            for kind, first, count in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1)):
                rows = count * self.head
                boxes = [
                    self._box(group * rows, rows, (group % (self.groups // tp)) * (queries + 2) + first, rank)
                    for group in range(self.groups)
                    for rank in [self.ranks[group // (self.groups // tp)]]
                ]
                shape = (self.groups * rows, self.hidden)
                yield f"self_attn.{kind}_proj.weight", parameter, ExplicitSharding(shape, ShardMap.of(boxes))
        elif part == "self_attention.linear_proj.weight":
            yield "self_attn.o_proj.weight", parameter, self._columns(self.heads * self.head)
        elif part == "mlp.linear_fc1.weight":
            rows = self.mlp // tp
            for half, kind in enumerate(("gate", "up")):
                boxes = [
                    (Box((place * rows, 0), ((place + 1) * rows, self.hidden)), (half * rows, 0), rank)
                    for place, rank in enumerate(self.ranks)
                ]
                sharding = ExplicitSharding((self.mlp, self.hidden), ShardMap.of(boxes))
                yield f"mlp.{kind}_proj.weight", parameter, sharding
        elif part == "mlp.linear_fc2.weight":
            yield "mlp.down_proj.weight", parameter, self._columns(self.mlp)
        else:
            yield _NORMS[part], parameter, self._whole(parameter)

    def _box(self, row: int, rows: int, local_heads: int, rank: int) -> tuple[Box, tuple[int, int], int]:
        return Box((row, 0), (row + rows, self.hidden)), (local_heads * self.head, 0), rank

    def _rows(self, rows: int, local_rows: int) -> ExplicitSharding:
        """Padded rows, at the end, belong to no checkpoint tensor."""
        boxes = [
            (Box((place * local_rows, 0), (min((place + 1) * local_rows, rows), self.hidden)), (0, 0), rank)
            for place, rank in enumerate(self.ranks)
            if place * local_rows < rows
        ]
        return ExplicitSharding((rows, self.hidden), ShardMap.of(boxes))

    def _columns(self, columns: int) -> ExplicitSharding:
        own = columns // len(self.ranks)
        boxes = [
            (Box((0, place * own), (self.hidden, (place + 1) * own)), (0, 0), rank)
            for place, rank in enumerate(self.ranks)
        ]
        return ExplicitSharding((self.hidden, columns), ShardMap.of(boxes))

    def _whole(self, parameter: torch.Tensor) -> ExplicitSharding:
        shape = tuple(parameter.shape)
        box = Box((0,) * len(shape), shape)
        return ExplicitSharding(shape, ShardMap.of((box, (0,) * len(shape), rank) for rank in self.ranks))
