"""The trainer: a transformers Qwen3 under plain torch tensor parallelism, one optimizer step at a time."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmark.demo import text

# One step has to change what the model says, visibly.
LEARNING_RATE = 2e-3

TP_PLAN: dict[str, ParallelStyle] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    # One weight for all heads, of which a rank sees its own only: as a DTensor its gradient is summed.
    "model.layers.*.self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "model.layers.*.self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


class Trainer:
    """One rank's part. Every rank makes one and calls the same methods in the same order.

    mesh  shards by tensor parallelism; over `data_mesh`, if given, FSDP2 shards again what that left
    """

    def __init__(self, config: Qwen3Config, mesh: DeviceMesh, data_mesh: DeviceMesh | None = None) -> None:
        torch.manual_seed(0)
        with torch.device(mesh.device_type):
            model = Qwen3ForCausalLM(config)
        self.model: torch.nn.Module = parallelize_module(model, mesh, TP_PLAN)
        if data_mesh is not None:
            for layer in self.model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=data_mesh)
            fully_shard(self.model, mesh=data_mesh)
        # foreach would put DTensors and the plain tensors of the layer norms into one call.
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=False)
        self._config = config
        self._device = mesh.device_type

    def step(self, tokenizer: Tokenizer) -> float:
        """One optimizer step on the corpus; its loss."""
        self._optimizer.zero_grad()
        rows = [encoding.ids for encoding in tokenizer.encode_batch(list(text.CORPUS))]
        length = min(map(len, rows))
        tokens = torch.tensor([row[:length] for row in rows], device=self._device)
        logits = self.model(tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def save_checkpoint(self, folder: Path) -> None:
        """Write what transformers and a stock engine load. For the proof only: resharding needs no checkpoint.

        Gathers the model on rank 0, which is what the rest of this package exists to avoid.
        """
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if state:  # the other ranks get nothing
            with torch.device("meta"):
                unsharded = Qwen3ForCausalLM(self._config)
            unsharded.save_pretrained(folder, state_dict=state)
