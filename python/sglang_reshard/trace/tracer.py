"""Runs a model's own loader once, over tensors without bytes, and returns what it would have done."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.audit import Change, Snapshot, TensorSlots
from sglang_reshard.trace.coverage import check_coverage, check_order
from sglang_reshard.trace.fills import without_overwritten_fills
from sglang_reshard.trace.lazy_tensor import LazyTensor, LiveWriteMode
from sglang_reshard.trace.loader import DeferredCall, collector_paused, held_post_load, inline_thread_pools
from sglang_reshard.trace.lowering import Lowering
from sglang_reshard.trace.operators import mapped
from sglang_reshard.trace.program import Program, Step
from sglang_reshard.trace.recorder import Recorder


def trace(
    model: torch.nn.Module,
    specs: Sequence[TensorSpec],
    scalars: Mapping[str, float] | None = None,
) -> Program:
    """The program of `model.load_weights` for checkpoint tensors like these.

    Nothing is written to the model, and its attributes are as before, also after an error. `scalars`
    has the values of one-element tensors, by name, for loaders that look at them.

    Raises Mismatch when the loader rejects the tensors, and Unsupported when what it does with them
    cannot be repeated as copies followed by steps.
    """
    began = time.perf_counter()
    _check_names(specs)
    with torch.no_grad(), collector_paused():
        recorder = Recorder(model, dict(scalars or {}))
        held = _run_loader(model, specs, recorder)
        records = without_overwritten_fills(recorder.records)
        check_order(records)
        check_coverage(model, recorder.storages, records)
        lowering = Lowering(recorder.device)
        for record in records:
            lowering.add(record)
    steps = (*lowering.steps, *_post_load_steps(model, held))
    used = {c.source for c in lowering.copies}
    return Program(
        sources=tuple(specs),
        copies=tuple(lowering.copies),
        targets=lowering.targets,
        steps=steps,
        seconds=time.perf_counter() - began,
        unused=tuple(s.name for s in specs if s.name not in used),
    )


def _check_names(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise Mismatch(f"The checkpoint tensor {spec.name} is sent twice.")
        seen.add(spec.name)


def _run_loader(model: torch.nn.Module, specs: Sequence[TensorSpec], recorder: Recorder) -> list[DeferredCall]:
    sources = [(spec.name, recorder.source(spec)) for spec in specs]
    handed_out = ["none yet"]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, standin in sources:
            handed_out[0] = name
            yield name, standin

    snapshot = Snapshot(model)
    changes: list[Change] = []
    try:
        # The snapshot is restored last, after the hooks on the model are gone.
        with ExitStack() as stack:
            stack.callback(lambda: changes.extend(snapshot.restore()))
            held = stack.enter_context(held_post_load(model))
            stack.enter_context(inline_thread_pools())
            stack.enter_context(LiveWriteMode(recorder))
            model.load_weights(weights())  # type: ignore[operator]
        if recorder.failure is not None:
            raise recorder.failure
    except ReshardError as error:
        raise type(error)(f"{error} (Tensor last handed to the loader: {handed_out[0]}.)") from error
    except Exception as error:
        raise _rejection(error, handed_out[0]) from error
    for call in held:
        mapped(_refuse_standin, (call.args, call.kwargs))
    for change in changes:
        _rebind(recorder, change)
    return held


def _rejection(error: Exception, tensor: str) -> ReshardError:
    what = f"{type(error).__name__}: {error}"
    # torch's ways to say that a tensor has no bytes, or is not one of its own.
    needs_bytes = (
        "data pointer",
        "on meta tensors",
        "doesn't have storage",
        "incompatible tensor type",
        "tensor subclasses",
    )
    if isinstance(error, NotImplementedError) or any(words in str(error) for words in needs_bytes):
        return Unsupported(f"The model's loader does something that cannot be traced, at {tensor}: {what}")
    if isinstance(error, AttributeError) and "weight_loader" in str(error):
        return Unsupported(
            f"The engine rebuilt the parameter that {tensor} is loaded into, after its start: it was quantized or "
            f"repacked, and SGLang's loader no longer knows it ({error}). Start the engine on weights as the trainer "
            "has them, without quantization="
        )
    return Mismatch(
        f"The model's loader rejected the tensors at {tensor}: {what}. Compare names, shapes and dtypes with those "
        "of the model's Hugging Face checkpoint."
    )


def _refuse_standin(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        raise Unsupported("The loader passes weights to post_load_weights; the trace cannot hold that call back.")
    return value


def _rebind(recorder: Recorder, change: Change) -> None:
    """The loader bound an attribute to a new tensor: write it into the memory of the old one."""
    before, after = change.before, change.after
    if (
        not isinstance(before, torch.Tensor)
        or isinstance(before, LazyTensor)
        or before.shape != after.shape
        or before.dtype != after.dtype
    ):
        had = f"a {tuple(before.shape)} {before.dtype} tensor" if isinstance(before, torch.Tensor) else repr(before)
        raise Unsupported(
            f"The loader binds {change.path} to a new tensor, {tuple(after.shape)} {after.dtype}, where there was "
            f"{had}. There is no memory of that shape to update in place; load a checkpoint from disk once first."
        )
    recorder.write(before.data, after)


def _post_load_steps(model: torch.nn.Module, held: Sequence[DeferredCall]) -> list[Step]:
    if not held:
        return []
    slots = TensorSlots(model)
    return [_post_load_step(call, slots) for call in held]


def _post_load_step(call: DeferredCall, slots: TensorSlots) -> Step:
    def run() -> None:
        call.module.post_load_weights(*call.args, **call.kwargs)  # type: ignore[operator]
        slots.keep_addresses()

    return Step(call.path, "post_load_weights", run)
