"""One trainer rank's weights: a transformers model under FSDP2, HSDP and tensor parallelism of torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, PretrainedConfig

from sglang_reshard.cli.layouts import Source
from sglang_reshard.selftest import stock
from sglang_reshard.selftest.job import Run

# One step has to change what the model says, visibly.
LEARNING_RATE = 2e-3
_ROWS, _ROW_TOKENS = 4, 24
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of experts, in transformers 5

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


def join(run: Run) -> torch.device:
    """Joins the other trainer ranks. Returns this one's device."""
    if run.device == "cpu":
        stock.prepare()
        dist.init_process_group("cpu:gloo")
        return torch.device("cpu")
    # NCCL needs a GPU for each rank. Where ranks share one, gloo gathers, in host memory: see `trainer.whole`.
    alone = len(run.trainer_gpus) >= run.source.ranks
    dist.init_process_group("cpu:gloo,cuda:nccl" if alone else "cpu:gloo,cuda:gloo")
    device = torch.device("cuda", run.trainer_gpus[dist.get_rank() % len(run.trainer_gpus)])
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # a mesh would choose a GPU by the local rank otherwise
    return device


class Trainer:
    """One rank's part. Every rank makes one and calls the same methods in the same order.

    learns  it takes gradient steps. Where ranks share a GPU, which torch's collectives do not support, each rank
            changes its own shards instead
    """

    def __init__(
        self,
        config: PretrainedConfig,
        source: Source,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(0)
        self._config, self._device = config, device
        self.learns = device.type == "cpu" or _backend(dist.group.WORLD, device) == "nccl"
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        sizes = source.replicas, source.fsdp, source.tp
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicas", "fsdp", "tp"))
        if source.tp > 1:
            parallelize_module(model, mesh["tp"], TP_PLAN)
            if config.tie_word_embeddings:
                model.lm_head.weight = model.model.embed_tokens.weight
        if source.replicas * source.fsdp > 1:
            data = mesh["replicas", "fsdp"] if source.replicas > 1 else mesh["fsdp"]
            for layer in model.model.layers:
                fully_shard(layer, mesh=data)
            fully_shard(model, mesh=data)
        self.model: torch.nn.Module = model

    @property
    def vocabulary(self) -> int:
        return int(self._config.vocab_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def partial(self) -> bool:
        """True if ranks list different tensors: each the experts that it holds."""
        return any(_is_stacked(name) for name, _ in self.model.named_parameters())

    def step(self, seed: int = 0) -> float:
        """Takes one step on random rows of tokens. Returns the loss; 0 where the trainer does not learn."""
        loss = 0.0
        if self.learns:
            self.model.zero_grad()
            numbers = torch.Generator().manual_seed(seed)
            tokens = torch.randint(1, self.vocabulary, (_ROWS, _ROW_TOKENS), generator=numbers).to(self._device)
            logits = self.model(tokens[:, :-1], use_cache=False).logits
            error = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            error.backward()
            loss = error.item()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    parameter.mul_(1.0625)
                else:
                    parameter.sub_(parameter.grad.sign(), alpha=LEARNING_RATE)  # as Adam's first step
        return loss

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Returns this rank's tensors under the names of a checkpoint, without a copy."""
        found: list[tuple[str, torch.Tensor]] = []
        for name, parameter in self.model.named_parameters():
            found += _experts(name, parameter) if _is_stacked(name) else [(name, parameter)]
        return found

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all of the model's tensors, gathered: those who judge need that, resharding does not. Collective."""
        for name, parameter in self.model.named_parameters():
            tensor = whole(parameter) if isinstance(parameter, DTensor) else parameter.detach()
            yield from _experts(name, tensor) if _is_stacked(name) else [(name, tensor)]

    def save_checkpoint(self, folder: Path) -> None:
        """Writes a checkpoint for transformers and a stock engine. Collective."""
        from safetensors.torch import save_file

        first = dist.get_rank() == 0
        tensors = {name: tensor.cpu().clone() for name, tensor in self.whole() if first}
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            self._config.save_pretrained(folder)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()


def whole(tensor: DTensor) -> torch.Tensor:
    """Returns all elements, on every rank of the tensor's mesh; in host memory, if gloo gathers them.

    torch's gloo reads the addresses of CUDA tensors as host memory when a DTensor is gathered: the process ends with
    SIGSEGV (pytorch/pytorch#152645).
    """
    with torch.no_grad():
        mesh = tensor.device_mesh
        if tensor.device.type == "cuda" and _backend(mesh.get_group(0), tensor.device) != "nccl":
            local = tensor.to_local().cpu()
            tensor = DTensor.from_local(
                local, _on_hosts(mesh), tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        found: torch.Tensor = tensor.full_tensor()
    return found


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    assert group is not None
    return str(group._get_backend(device).name())


@functools.cache
def _on_hosts(mesh: DeviceMesh) -> DeviceMesh:
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def _is_stacked(name: str) -> bool:
    return ".experts." in name and name.rpartition(".")[2] in _STACKED


def _experts(name: str, stacked: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Returns the experts' tensors of a stacked one, under the names of a checkpoint: those that this rank holds."""
    numbers = list(range(stacked.shape[0]))
    if isinstance(stacked, DTensor):
        mine = distribute_tensor(
            torch.arange(stacked.shape[0]), _on_hosts(stacked.device_mesh), stacked.placements, src_data_rank=None
        )
        numbers, stacked = mine.to_local().tolist(), stacked.to_local()
    prefix, _, kind = name.rpartition(".")
    return [
        (f"{prefix}.{number}.{part}.weight", rows)
        for number, expert in zip(numbers, stacked.detach(), strict=True)
        for part, rows in zip(_STACKED[kind], expert.chunk(len(_STACKED[kind])), strict=True)
    ]
