"""Computes or takes the trainer's log-probabilities of a probe."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.probe.probe import Probe


def trainer_logprobs(probe: Probe) -> tuple[tuple[float, ...], ...]:
    """Returns the trainer's log-probabilities by sequence, of all tokens but the first. Collective, as the module is.

    Raises Mismatch if there are not as many as the sequences have tokens, and the errors of the module or function.
    """
    sequences, given = probe.token_ids(), probe.logprobs
    if isinstance(given, nn.Module):
        found: Any = module_logprobs(given, sequences)
    else:
        found = given(sequences) if callable(given) else given
    if len(found) != len(sequences):
        raise Mismatch(f"logprobs of the probe returned {len(found)} entries for {len(sequences)} sequences")
    return tuple(_floats(number, tokens, found[number]) for number, tokens in enumerate(sequences))


@torch.no_grad()
def module_logprobs(module: nn.Module, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Runs a module on one sequence at a time, without padding, in evaluation mode.

    Returns one float32 tensor of n - 1 elements for each sequence of n tokens. Collective where the forward is: FSDP,
    tensor parallel.

    module  takes token ids of shape [1, n]; returns logits of shape [1, n, vocabulary], or an object or a tuple that
            has them as `logits` or first. A DTensor keeps its shards of the vocabulary. The module's `training` flags
            are as before afterwards
    """
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    with _evaluating(module):
        return [_of_sequence(module, torch.tensor([list(tokens)], device=device)) for tokens in sequences]


def _of_sequence(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    output = module(ids)
    logits = output[0] if isinstance(output, tuple) else getattr(output, "logits", output)
    if isinstance(logits, DTensor):
        return _of_shards(logits, ids[0, 1:])
    chosen = logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None].to(logits.device))
    return chosen[:, 0]


def _of_shards(logits: DTensor, chosen: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities of the tokens `chosen`, [n - 1], of logits [1, n, vocabulary]. Collective.

    Mesh dimensions that shard the vocabulary keep their shards: three numbers of each token are reduced over them.
    """
    mesh, vocabulary = logits.device_mesh, logits.ndim - 1
    placements = [p if type(p) is Shard and p.dim == vocabulary else Replicate() for p in logits.placements]
    local = logits.redistribute(placements=placements).to_local()[0, :-1].float()
    columns = torch.arange(logits.shape[-1], device=local.device)
    of_columns = [Shard(0) if isinstance(p, Shard) else p for p in placements]
    own = distribute_tensor(columns, mesh, of_columns, src_data_rank=None).to_local()
    lowest = local.new_full((len(local), 1), -math.inf)  # a rank may have no column
    largest = torch.cat([local, lowest], dim=-1).amax(-1)
    sharded = [mesh.get_group(dim) for dim, p in enumerate(placements) if isinstance(p, Shard)]
    for group in sharded:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = (local - largest[:, None]).exp().sum(-1)
    found = local.masked_fill(own != chosen.to(local.device)[:, None], 0.0).sum(-1)
    for group in sharded:
        dist.all_reduce(sums, group=group)
        dist.all_reduce(found, group=group)
    return found - largest - sums.log()


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Turns dropout off. Shards FSDP2's modules again, before as well.

    A forward without a backward leaves FSDP2's root unsharded, and the next one reuses that copy, although an optimizer
    may have written since.
    """
    modes = [(part, part.training) for part in module.modules()]
    _shard_again(module)
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        _shard_again(module)


def _shard_again(module: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _floats(number: int, tokens: Sequence[int], logprobs: Any) -> tuple[float, ...]:
    if isinstance(logprobs, DTensor):
        logprobs = logprobs.full_tensor()  # n - 1 numbers that every trainer rank compares, and no weights
    values = torch.as_tensor(logprobs).detach().to("cpu", torch.float64)
    if values.shape != (len(tokens) - 1,):
        raise Mismatch(
            f"logprobs of the probe returned shape {tuple(values.shape)} for sequence {number} of {len(tokens)} "
            f"tokens; it must be ({len(tokens) - 1},): one for each token but the first"
        )
    return tuple(values.tolist())
