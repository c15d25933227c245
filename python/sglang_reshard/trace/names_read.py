"""Finds out which names a model's loader reads, without asking whether that is all it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_reshard.errors import ReshardError
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.lazy_tensor import checkpoint_tensors
from sglang_reshard.trace.loader import Loader, loader_of, run_loader
from sglang_reshard.trace.tracer import tracing


class NamesRead(NamedTuple):
    """The names that a loader has read, and the one that it refused.

    read     names of those that reach a live tensor
    refused  the name at which the loader raised; empty if it did not
    """

    read: frozenset[str]
    refused: str


def names_read(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> NamesRead:
    """Runs `model.load_weights` as a trace does, and returns what it reads. Raises nothing that the loader raises."""
    loader = loader_of(model)
    with tracing(), loader.prepared():
        found = _names_read(loader, specs)
        if found.refused and (others := loader.instead(specs)):  # it may take quantized weights only
            found = max(found, _names_read(loader, others), key=lambda one: len(one.read))
    return found


def _names_read(loader: Loader, specs: Sequence[TensorSpec]) -> NamesRead:
    recorder, refused = loader.recorder(), ""
    try:
        run_loader(loader.model, specs, recorder)
    except ReshardError:
        refused = recorder.received
    read = (tensor.spec.name for record in recorder.records for tensor in checkpoint_tensors(record.content))
    return NamesRead(frozenset(read), refused)
