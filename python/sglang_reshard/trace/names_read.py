"""Finds out which names a model's loader reads, without asking whether that is all it needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.block_formats import Blocks, blocks_of
from sglang_reshard.trace.block_specs import as_quantized, checkpoint_tensors, in_fp8, wider, with_whole_scale
from sglang_reshard.trace.built_modules import modules_as_built
from sglang_reshard.trace.recorder import Recorder
from sglang_reshard.trace.repack import repacked_modules
from sglang_reshard.trace.tracer import run_loader, tracing


class NamesRead(NamedTuple):
    """The names that a loader has read, and the one that it refused.

    read     names of those that reach a live tensor
    refused  the name at which the loader raised; empty if it did not
    """

    read: frozenset[str]
    refused: str


def names_read(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> NamesRead:
    """Runs `model.load_weights` as a trace does, and returns what it reads. Raises nothing that the loader raises."""
    with tracing(), modules_as_built([(m.module, m.built) for m in repacked_modules(model)]) as parameters:
        found = _names_read(model, specs, parameters)
        blocks = blocks_of(model)
        if found.refused and blocks is not None:  # its loader may take quantized weights only
            others = _quantized(specs, blocks)
            found = max(found, _names_read(model, others, parameters), key=lambda one: len(one.read))
    return found


def _quantized(specs: Sequence[TensorSpec], blocks: Blocks) -> list[TensorSpec]:
    if blocks.whole:
        return as_quantized(specs, with_whole_scale(specs, blocks), blocks)
    candidates = wider(specs, blocks)
    return [in_fp8(spec) if spec.name in candidates else spec for spec in specs]


def _names_read(model: torch.nn.Module, specs: Sequence[TensorSpec], as_built: Collection[int]) -> NamesRead:
    recorder, refused = Recorder(model, as_built), ""
    try:
        run_loader(model, specs, recorder)
    except ReshardError:
        refused = recorder.received
    read = (tensor.spec.name for record in recorder.records for tensor in checkpoint_tensors(record.content))
    return NamesRead(frozenset(read), refused)
