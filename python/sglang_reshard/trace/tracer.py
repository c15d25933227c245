"""Traces a model's own `load_weights`: what it would have done as a Program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.garbage import garbage_collector_paused
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.coverage import check_order, is_complete
from sglang_reshard.trace.geometry import forget_boxes
from sglang_reshard.trace.loader import NamesRead, check_names, loader_of
from sglang_reshard.trace.lowering import Lowering, drop_repeated_writes
from sglang_reshard.trace.program import MayStay, Program, Step

if TYPE_CHECKING:
    from sglang_reshard.trace.stock_load import EngineStart

_NOTHING = MayStay()
_one_at_a_time = threading.Lock()  # what a trace replaces meanwhile is the whole process's


def trace(
    model: torch.nn.Module,
    specs: Sequence[TensorSpec],
    start: Callable[[], EngineStart] | None = None,
    *,
    may_stay: MayStay = _NOTHING,
    weightless: bool = False,
) -> Program:
    """Returns the program of `model.load_weights` for checkpoint tensors with these names, shapes and dtypes.

    start       returns how the engine was started; asked only if something is not written. Without it every parameter
                must be, and every persistent buffer that the loader takes
    may_stay    says what may stay as it is, if nothing writes it: the program's `kept`
    weightless  the model was built on the meta device, see `live_storages`

    Writes nothing to the model and restores its attributes, also after an error. Weights for an engine that quantizes
    in blocks which have more bits are quantized by the program, see `block_fp8`, and modules that were repacked after
    loading are repacked again, see `repack`.

    Raises Mismatch if the loader rejects the tensors, and Unsupported if what it does cannot be repeated as copies
    followed by steps.
    """
    check_names(specs)
    with _tracing():
        try:
            return _traced(model, specs, start, may_stay, weightless)
        except ReshardError as error:
            from sglang_reshard.trace.converting_loader import refusal_of_nvfp4

            if why := refusal_of_nvfp4(model, specs):
                raise Unsupported(why) from error
            raise


def _traced(
    model: torch.nn.Module,
    specs: Sequence[TensorSpec],
    start: Callable[[], EngineStart] | None,
    may_stay: MayStay,
    weightless: bool,
) -> Program:
    loader = loader_of(model, weightless)
    left: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    restoring: Sequence[Step] = ()
    with loader.prepared():
        loaded = loader.run(specs)
        check_order(loaded.writes)
        writes, every = drop_repeated_writes(loaded.writes), drop_repeated_writes(loaded.all_written)
        if loader.repacked or not is_complete(model, loaded.storages, every):
            from sglang_reshard.trace.gaps import find_gaps

            left, kept, restoring = find_gaps(loader, loaded, every, specs, start, may_stay)
    lowering = Lowering(loaded.recorder.device)
    for record in writes:
        lowering.add(record)
    for record in loaded.overwritten:
        lowering.read(record)
    written = {record.storage.name for record in writes}
    steps = (
        *restoring,
        *(step for one in loaded.passes for step in one.first()),
        *lowering.steps,
        *(step for one in loaded.passes for step in one.last(written)),
    )
    program = Program(tuple(lowering.copies), lowering.targets, steps, left_alone=left, kept=kept)
    return loader.converted(program, loaded, specs)


def names_read(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> NamesRead:
    """Returns what the model's loader reads of these tensors. Raises nothing that it raises."""
    loader = loader_of(model)
    with _tracing(), loader.prepared():
        found = loader.names_read(specs)
        if found.refused and (others := loader.instead(specs)):  # it may take quantized weights only
            found = max(found, loader.names_read(others), key=lambda one: len(one.read))
    return found


@contextmanager
def _tracing() -> Iterator[None]:
    """Around a run of a loader over lazy tensors: one at a time, without gradients."""
    with _one_at_a_time, torch.no_grad(), garbage_collector_paused():
        try:
            yield
        finally:
            forget_boxes()
