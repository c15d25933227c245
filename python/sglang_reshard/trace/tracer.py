"""Runs a model's own `load_weights` over lazy tensors, and returns what it would have done as a Program."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.garbage import garbage_collector_paused
from sglang_reshard.layout.names import is_held_back
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.block_formats import Blocks, blocks_of
from sglang_reshard.trace.block_fp8 import quantize_on_arrival
from sglang_reshard.trace.block_specs import (
    as_quantized,
    checkpoint_tensors,
    in_fp8,
    sources_of_fp8,
    wider,
    with_whole_scale,
    without_scales,
)
from sglang_reshard.trace.built_modules import modules_as_built
from sglang_reshard.trace.coverage import check_coverage
from sglang_reshard.trace.folded import flags_of, label, unfold_steps
from sglang_reshard.trace.geometry import boxes_forgotten
from sglang_reshard.trace.kept import MayStay, engine_name, kept_modules, names_kept
from sglang_reshard.trace.kv_scales import kv_scale_steps
from sglang_reshard.trace.lazy_tensor import LazyTensor, LiveWriteMode
from sglang_reshard.trace.left_alone import check_buffers, restoring_steps
from sglang_reshard.trace.lowering import Lowering, drop_overwritten_fills, drop_repeated_writes
from sglang_reshard.trace.memory import Record
from sglang_reshard.trace.nvfp4 import WHOLE, nvfp4_layers, refusal
from sglang_reshard.trace.post_load import DeferredCall, defer_post_load, post_load_steps
from sglang_reshard.trace.program import Program
from sglang_reshard.trace.quantized_parts import check_quantized
from sglang_reshard.trace.read_order import check_order
from sglang_reshard.trace.recorder import Recorder
from sglang_reshard.trace.repack import (
    RepackedModule,
    check_deferred,
    repack_on_arrival,
    repacked_modules,
    split_records,
)
from sglang_reshard.trace.snapshot import ABSENT, AttributeSnapshot, Change
from sglang_reshard.trace.stock_load import EngineStart, StockLoad

# What torch says of a tensor without memory, or of a subclass.
_NEEDS_MEMORY = (
    "data pointer", "on meta tensors", "doesn't have storage", "incompatible tensor type", "tensor subclasses"
)  # fmt: skip

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

    Writes nothing to the model and restores its attributes, also after an error. Weights for a block-fp8 engine that
    have more bits are quantized by the program, see `block_fp8`, and modules that were repacked after loading are
    repacked again, see `repack`.

    Raises Mismatch if the loader rejects the tensors, and Unsupported if what it does cannot be repeated as copies
    followed by steps.
    """
    began = time.perf_counter()
    _check_names(specs)
    with tracing():
        try:
            program = _traced(model, specs, start, may_stay, weightless)
        except ReshardError as error:
            if why := _refusal_of_nvfp4(model, specs):
                raise Unsupported(why) from error
            raise
    return replace(program, seconds=time.perf_counter() - began)


def _traced(
    model: torch.nn.Module,
    specs: Sequence[TensorSpec],
    start: Callable[[], EngineStart] | None,
    may_stay: MayStay,
    weightless: bool,
) -> Program:
    blocks = blocks_of(model)
    repacked = repacked_modules(model)
    with modules_as_built([(m.module, m.built) for m in repacked]) as parameters:
        loader = _Loader(model, blocks, parameters, weightless)
        found, quantized = loader.run(specs)
        storages = found.recorder.storages
        parts = split_records(repacked, storages, found.records)
        check_order(parts.writes)
        writes, every = drop_repeated_writes(parts.writes), drop_repeated_writes(parts.all_written)

        def stays(name: str) -> bool:
            return may_stay(engine_name(model, name))

        stock = _stock_load(loader, repacked, specs, every, start, may_stay)
        staying = kept_modules(model, repacked, storages, found.records, may_stay, stock.all_may_stay)
        repacked = [module for module in repacked if module not in staying]
        left, kept = check_coverage(model, storages, every, parameters, stock, stays)
        all_written = {record.storage for record in every}
        kept += check_buffers(model, storages, all_written, stock, stays)
        check_quantized(model, storages, every, kept, stock)
    check_deferred(repacked, found.deferred)
    lowering = Lowering(found.recorder.device)
    for record in writes:
        lowering.add(record)
    for record in parts.overwritten:
        lowering.read(record)
    written = {record.storage.name for record in writes}
    steps = (
        *restoring_steps(model, left, stock),
        *unfold_steps(flags_of(model), found.flags),
        *lowering.steps,
        *kv_scale_steps(model, written),
        *post_load_steps(model, found.deferred),
    )
    program = Program(
        tuple(lowering.copies),
        lowering.targets,
        steps,
        left_alone=tuple(dict.fromkeys(one.name for one in left)),
        kept=names_kept(model, kept, staying),
    )
    if repacked:
        program = repack_on_arrival(program, repacked, parts.constants)
    if blocks is not None and quantized:
        by_name = {spec.name: spec for spec in specs}
        program = quantize_on_arrival(program, by_name, quantized, blocks)
    return program


def _refusal_of_nvfp4(model: torch.nn.Module, specs: Sequence[TensorSpec]) -> str:
    """Returns why a trace of an NVFP4 engine has failed; empty unless it is for a weight in 16 or 32 bits."""
    if not (layers := nvfp4_layers(model)):
        return ""
    repacked = repacked_modules(model)
    with modules_as_built([(m.module, m.built) for m in repacked]) as parameters:
        recorder = Recorder(model, parameters)
        with suppress(ReshardError):
            run_loader(model, specs, recorder)
    taken = {tensor.spec.name for record in recorder.records for tensor in checkpoint_tensors(record.content)}
    wide = without_scales(specs, ("_scale", WHOLE))
    return refusal(layers, [spec for spec in wide if spec.name not in taken])


@contextmanager
def tracing() -> Iterator[None]:
    """Around a run of a loader over lazy tensors: one at a time, without gradients."""
    with _one_at_a_time, torch.no_grad(), garbage_collector_paused(), boxes_forgotten():
        yield


class _Traced(NamedTuple):
    """A loader's writes of checkpoint tensors, the calls of post_load_weights that it made, and flags that it set."""

    recorder: Recorder
    records: list[Record]
    deferred: list[DeferredCall]
    flags: set[str]


class _Loader(NamedTuple):
    """A model's loader, while modules are as they were built.

    blocks    of a block-fp8 or NVFP4 model; None of another
    as_built  storages of repacked modules' parameters, see `modules_as_built`
    """

    model: torch.nn.Module
    blocks: Blocks | None
    as_built: Collection[int]
    weightless: bool

    def run(self, specs: Sequence[TensorSpec], last: list[str] | None = None) -> tuple[_Traced, set[str]]:
        """Runs it. Also returns the names of tensors that such a model got quantized although `specs` have more.

        last  gets the name of the last tensor that the loader received
        """
        last = [] if last is None else last
        if self.blocks is None:
            return self._once(specs, last), set()
        if self.blocks.whole:
            names = with_whole_scale(specs, self.blocks)
            return self._once(as_quantized(specs, names, self.blocks), last), names
        candidates, refusal = wider(specs, self.blocks), None
        try:
            found = self._once(specs, last)
            names = sources_of_fp8(found.records) & candidates
            if not names:
                return found, names
        except ReshardError as error:
            refusal = error  # of a loader that checks dtypes itself, perhaps
        if refusal is not None:
            try:
                in_8_bits = [in_fp8(spec) if spec.name in candidates else spec for spec in specs]
                given = self._once(in_8_bits, last)
            except ReshardError:
                raise refusal from None
            names = sources_of_fp8(given.records) & candidates
            if not names:
                raise refusal
        return self._once(as_quantized(specs, names, self.blocks), last), names

    def _once(self, specs: Sequence[TensorSpec], last: list[str]) -> _Traced:
        recorder = Recorder(self.model, self.as_built, weightless=self.weightless)
        try:
            deferred, flags = run_loader(self.model, specs, recorder)
        finally:
            last[:] = [recorder.received]
        return _Traced(recorder, drop_overwritten_fills(recorder.records), deferred, flags)


def _stock_load(
    loader: _Loader,
    repacked: Sequence[RepackedModule],
    specs: Sequence[TensorSpec],
    records: Sequence[Record],
    start: Callable[[], EngineStart] | None,
    may_stay: MayStay,
) -> StockLoad:
    """Returns the trace of a start on the engine's checkpoint. Must be asked while modules are as they were built."""

    def records_of(others: Sequence[TensorSpec], last: list[str]) -> Sequence[Record]:
        _check_names(others)
        found, _ = loader.run(others, last)
        return split_records(repacked, found.recorder.storages, found.records).all_written

    return StockLoad(specs, records, start, records_of, may_stay)


def _check_names(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise Mismatch(f"The checkpoint tensor {spec.name} is sent twice. Send each name once.")
        seen.add(spec.name)


def run_loader(
    model: torch.nn.Module, specs: Sequence[TensorSpec], recorder: Recorder
) -> tuple[list[DeferredCall], set[str]]:
    """Records what the loader writes. Returns its calls of post_load_weights, and the flags that it sets, by `label`.

    Restores the model's attributes. Raises Mismatch and Unsupported as `trace`; the recorder has then what was written
    before.
    """
    given = (spec for spec in specs if not is_held_back(spec.name))
    tensors = [(spec.name, recorder.checkpoint_tensor(spec)) for spec in given]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            recorder.received = name
            yield name, tensor

    snapshot, flags = AttributeSnapshot(model), flags_of(model)
    changes: list[Change] = []
    try:
        # The snapshot is restored last, after the hooks on the model are gone.
        with ExitStack() as stack:
            stack.callback(lambda: changes.extend(snapshot.restore()))
            deferred = stack.enter_context(defer_post_load(model))
            stack.enter_context(_inline_thread_pools())
            stack.enter_context(LiveWriteMode(recorder))
            for flag in flags:
                flag.put(False)
            model.load_weights(weights())  # type: ignore[operator]
            set_flags = {label(flag) for flag in flags if flag.is_set}
        if recorder.failure is not None:
            raise recorder.failure
    except ReshardError as error:
        raise type(error)(f"{error} (Last tensor that the loader received: {recorder.received}.)") from error
    except Exception as error:
        raise _explained(error, recorder.received, model) from error
    for change in changes:
        _write_rebound(recorder, change)
    return deferred, set_flags


def _explained(error: Exception, tensor: str, model: torch.nn.Module) -> ReshardError:
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, NotImplementedError) or any(words in str(error) for words in _NEEDS_MEMORY):
        return Unsupported(
            f"The model's loader does something that cannot be traced, at {tensor}: {what}. Update this model with "
            "SGLang's own update_weights_from_tensor."
        )
    if isinstance(error, AttributeError) and "weight_loader" in str(error):
        return Unsupported(
            f"The engine has replaced the parameter that {tensor} is loaded into since its start: the parameter was "
            f"quantized or repacked, and SGLang's loader can no longer load it ({error}). Start the engine on weights "
            "in the trainer's format, without quantization="
        )
    advice = "Compare names, shapes and dtypes with those of the model's Hugging Face checkpoint."
    if method := _quantization_method(model):
        advice += (
            f" If they are the same, the engine has transposed or packed what it loaded ({method} does so): start it "
            "on weights in the trainer's format, without quantization="
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
