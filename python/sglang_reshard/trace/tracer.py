"""Runs a model's own `load_weights` over lazy tensors, and returns what it would have done as a Program."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.garbage import garbage_collector_paused
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.block_fp8 import (
    as_quantized,
    block_size,
    in_fp8,
    quantize_on_arrival,
    sources_of_fp8,
    wider,
)
from sglang_reshard.trace.built_modules import modules_as_built
from sglang_reshard.trace.coverage import check_coverage, check_order
from sglang_reshard.trace.geometry import boxes_forgotten
from sglang_reshard.trace.kv_scales import kv_scale_steps
from sglang_reshard.trace.lazy_tensor import LazyTensor, LiveWriteMode
from sglang_reshard.trace.lowering import Lowering, drop_overwritten_fills, drop_repeated_writes
from sglang_reshard.trace.memory import Record
from sglang_reshard.trace.post_load import DeferredCall, defer_post_load, post_load_steps
from sglang_reshard.trace.program import Program
from sglang_reshard.trace.recorder import Recorder
from sglang_reshard.trace.repack import (
    check_deferred,
    repack_on_arrival,
    repacked_modules,
    split_records,
)
from sglang_reshard.trace.snapshot import ABSENT, AttributeSnapshot, Change

# What torch says of a tensor without memory, or of a subclass.
_NEEDS_MEMORY = (
    "data pointer", "on meta tensors", "doesn't have storage", "incompatible tensor type", "tensor subclasses"
)  # fmt: skip

_one_at_a_time = threading.Lock()  # what a trace replaces meanwhile is the whole process's


def trace(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> Program:
    """Returns the program of `model.load_weights` for checkpoint tensors with these names, shapes and dtypes.

    Writes nothing to the model and restores its attributes, also after an error. Weights for a block-fp8 engine that
    have more bits are quantized by the program, see `block_fp8`, and modules that were repacked after loading are
    repacked again, see `repack`.

    Raises Mismatch if the loader rejects the tensors, and Unsupported if what it does cannot be repeated as copies
    followed by steps.
    """
    began = time.perf_counter()
    _check_names(specs)
    with _one_at_a_time, torch.no_grad(), garbage_collector_paused(), boxes_forgotten():
        block, quantized = block_size(model), set[str]()
        repacked = repacked_modules(model)
        with modules_as_built([(m.module, m.built) for m in repacked]) as parameters:
            if block is None:
                found = _traced(model, specs, parameters)
            else:
                found, quantized = _traced_in_blocks(model, specs, block, parameters)
            parts = split_records(repacked, found.recorder.storages, found.records)
            check_order(parts.writes)
            writes = drop_repeated_writes(parts.writes)
            check_coverage(model, found.recorder.storages, drop_repeated_writes(parts.all_written), parameters)
        check_deferred(repacked, found.deferred)
        lowering = Lowering(found.recorder.device)
        for record in writes:
            lowering.add(record)
        for record in parts.overwritten:
            lowering.read(record)
        written = {record.storage.name for record in writes}
        steps = (*lowering.steps, *kv_scale_steps(model, written), *post_load_steps(model, found.deferred))
        program = Program(tuple(lowering.copies), lowering.targets, steps)
        if repacked:
            program = repack_on_arrival(program, repacked, parts.constants)
        if block is not None and quantized:
            by_name = {spec.name: spec for spec in specs}
            program = quantize_on_arrival(program, by_name, quantized, block)
    return replace(program, seconds=time.perf_counter() - began)


class _Traced(NamedTuple):
    """A loader's writes of checkpoint tensors, and the calls of post_load_weights that it made."""

    recorder: Recorder
    records: list[Record]
    deferred: list[DeferredCall]


def _traced(model: torch.nn.Module, specs: Sequence[TensorSpec], as_built: Collection[int]) -> _Traced:
    recorder = Recorder(model, as_built)
    deferred = _run_loader(model, specs, recorder)
    return _Traced(recorder, drop_overwritten_fills(recorder.records), deferred)


def _traced_in_blocks(
    model: torch.nn.Module, specs: Sequence[TensorSpec], block: tuple[int, int], as_built: Collection[int]
) -> tuple[_Traced, set[str]]:
    """Traces a block-fp8 model. Returns the names, too, of what it was given in fp8 although `specs` have more bits."""
    candidates, refusal = wider(specs), None
    try:
        found = _traced(model, specs, as_built)
        names = sources_of_fp8(found.records) & candidates
        if not names:
            return found, names
    except ReshardError as error:
        refusal = error  # of a loader that checks dtypes itself, perhaps
    if refusal is not None:
        try:
            in_8_bits = [in_fp8(spec) if spec.name in candidates else spec for spec in specs]
            given = _traced(model, in_8_bits, as_built)
        except ReshardError:
            raise refusal from None
        names = sources_of_fp8(given.records) & candidates
        if not names:
            raise refusal
    return _traced(model, as_quantized(specs, names, block), as_built), names


def _check_names(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise Mismatch(f"The checkpoint tensor {spec.name} is sent twice. Send each name once.")
        seen.add(spec.name)


def _run_loader(model: torch.nn.Module, specs: Sequence[TensorSpec], recorder: Recorder) -> list[DeferredCall]:
    tensors = [(spec.name, recorder.checkpoint_tensor(spec)) for spec in specs]
    last = ["none yet"]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            last[0] = name
            yield name, tensor

    snapshot = AttributeSnapshot(model)
    changes: list[Change] = []
    try:
        # The snapshot is restored last, after the hooks on the model are gone.
        with ExitStack() as stack:
            stack.callback(lambda: changes.extend(snapshot.restore()))
            deferred = stack.enter_context(defer_post_load(model))
            stack.enter_context(_inline_thread_pools())
            stack.enter_context(LiveWriteMode(recorder))
            model.load_weights(weights())  # type: ignore[operator]
        if recorder.failure is not None:
            raise recorder.failure
    except ReshardError as error:
        raise type(error)(f"{error} (Last tensor that the loader received: {last[0]}.)") from error
    except Exception as error:
        raise _explained(error, last[0], model) from error
    for change in changes:
        _write_rebound(recorder, change)
    return deferred


def _explained(error: Exception, tensor: str, model: torch.nn.Module) -> ReshardError:
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, NotImplementedError) or any(words in str(error) for words in _NEEDS_MEMORY):
        return Unsupported(
            f"The model's loader does something that cannot be traced, at {tensor}: {what}. Update this model with "
            "SGLang's own update_weights_from_tensor."
        )
    if isinstance(error, AttributeError) and "weight_loader" in str(error):
        return Unsupported(
            f"The engine has replaced the parameter that {tensor} is loaded into since its start: it was quantized or "
            f"repacked, and SGLang's loader cannot load it any more ({error}). Start the engine on weights as the "
            "trainer has them, without quantization="
        )
    advice = "Compare names, shapes and dtypes with those of the model's Hugging Face checkpoint."
    if method := _quantization_method(model):
        advice += (
            f" If they are the same, the engine has transposed or packed what it loaded ({method} does so): start it "
            "on weights as the trainer has them, without quantization="
        )
    return Mismatch(f"The model's loader rejected the tensors at {tensor}: {what}. {advice}")


def _quantization_method(model: torch.nn.Module) -> str:
    """Returns the class of the first quantization method of a linear layer in `model`; empty if there is none."""
    methods = (type(getattr(module, "quant_method", None)).__name__ for module in model.modules())
    return next((name for name in methods if name.endswith("LinearMethod") and "Unquantized" not in name), "")


def _write_rebound(recorder: Recorder, change: Change) -> None:
    """Records a write to the old tensor of an attribute that the loader has bound to a new one."""
    before, after = change.before, change.after
    if (
        not isinstance(before, torch.Tensor)
        or isinstance(before, LazyTensor)
        or before.shape != after.shape
        or before.dtype != after.dtype
    ):
        had = "nothing" if before is ABSENT else repr(before)
        if isinstance(before, torch.Tensor):
            had = f"a {tuple(before.shape)} {before.dtype} tensor"
        raise Unsupported(
            f"The loader binds {change.path} to a new tensor, {tuple(after.shape)} {after.dtype}, where there was "
            f"{had}. No memory of that shape exists to be updated in place; load a checkpoint from disk once first."
        )
    recorder.write(before.data, after)


@contextmanager
def _inline_thread_pools() -> Iterator[None]:
    """Runs what this thread submits to a ThreadPoolExecutor in this thread: a dispatch mode is thread-local."""
    thread, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def inline(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != thread:
            return submit(self, fn, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future

    ThreadPoolExecutor.submit = inline  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
