"""Runs a model's own `load_weights` over lazy tensors, and returns what it would have written.

Asks the model's modules what the loader needs in addition. Only that is imported; each module has its pass, `Run`.

    folded     flags that say that parameters were changed in place once they were loaded
    kv_scales  scales of the KV cache: attention reads copies of them
    post_load  calls of `post_load_weights`, which compute with loaded weights
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import torch

from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.layout.names import is_held_back
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.lazy_tensor import LazyTensor, LiveStorage, LiveWriteMode, Record, checkpoint_tensors
from sglang_reshard.trace.lowering import drop_overwritten_fills
from sglang_reshard.trace.program import Program, Step
from sglang_reshard.trace.recorder import Recorder
from sglang_reshard.trace.snapshot import ABSENT, Change, attributes_restored

# What torch says of a tensor without memory, or of a subclass.
_NEEDS_MEMORY = (
    "data pointer", "on meta tensors", "doesn't have storage", "incompatible tensor type", "tensor subclasses"
)  # fmt: skip
BUILT = "_reshard_built"  # the attribute of a module that has its `built_modules.BuiltModule`
FLAGS = "_reshard_flags"  # the attribute of a model that has the flags that `folded.remember_built` has found


class Pass:
    """One run of a loader, for one pass. This base class adds nothing to it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    @contextmanager
    def running(self) -> Iterator[None]:
        """The loader runs within it."""
        yield

    def first(self) -> Sequence[Step]:
        """Returns steps that come before the loader's own."""
        return ()

    def last(self, written: Collection[str]) -> Sequence[Step]:
        """Returns steps that come after the loader's own. `written`: names of the storages that are written."""
        return ()


def may_convert(module: torch.nn.Module) -> bool:
    """Returns whether a module has been repacked after loading, or may keep weights that are quantized in blocks."""
    built = vars(module).get(BUILT)
    if built is not None and built.differs(module):
        return True
    return getattr(getattr(module, "quant_method", None), "quant_config", None) is not None


def has_flags(module: torch.nn.Module) -> bool:
    """Returns whether a module may have flags, or had some when it was built. Torch's own modules have none."""
    attributes = vars(module)
    of_torch = type(module).__module__.startswith("torch.")
    return bool(attributes.get(FLAGS)) or (not of_torch and any(value is False for value in attributes.values()))


# Their last steps come in this order.
_ASKED: dict[str, Callable[[torch.nn.Module], bool]] = {
    "folded": has_flags,
    "kv_scales": lambda m: any(isinstance(getattr(m, n, None), torch.Tensor) for n in ("k_scale", "v_scale")),
    "post_load": lambda module: callable(getattr(module, "post_load_weights", None)),
}


def passes_of(model: torch.nn.Module) -> list[Pass]:
    """Returns the passes of one run of the model's loader."""
    modules = list(model.modules())
    return [
        import_module(f"sglang_reshard.trace.{name}").Run(model)
        for name, applies in _ASKED.items()
        if any(map(applies, modules))
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """One run of a loader over some checkpoint tensors.

    writes       its writes to live memory, and to the memory of modules that are converted
    all_written  `writes`, and the constants that it fills into converted modules
    passes       of the run
    overwritten  copies that later ones replace: their tensors are read, and nothing of them is kept
    constants    by path of a converted module: fills of its parameters
    quantized    names of the tensors that it was given quantized, although the trainer has them in more bits
    """

    recorder: Recorder
    writes: Sequence[Record]
    all_written: Sequence[Record]
    passes: Sequence[Pass]
    overwritten: Sequence[Record] = ()
    constants: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    quantized: Collection[str] = ()

    @property
    def storages(self) -> dict[int, LiveStorage]:
        return self.recorder.storages


class NamesRead(NamedTuple):
    """The names that a loader has read, and the one that it refused.

    read     names of those that reach a live tensor
    refused  the name at which the loader raised; empty if it did not
    """

    read: frozenset[str]
    refused: str


class Loader:
    """The loader of a model whose parameters are as it knows them. `converting_loader.ConvertingLoader` has others.

    as_built  keys of the storages, without memory, that stand for parameters of converted modules
    repacked  the converted modules
    """

    as_built: Collection[int] = ()
    repacked: Sequence[Any] = ()

    def __init__(self, model: torch.nn.Module, weightless: bool = False) -> None:
        """`weightless`: see `live_storages`."""
        self.model, self._weightless = model, weightless

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """The model's modules are as the loader knows them within it."""
        yield

    def run(self, specs: Sequence[TensorSpec], last: list[str] | None = None) -> Loaded:
        """Runs it over just these checkpoint tensors. `last` gets the name of the last one that it received.

        Raises Mismatch and Unsupported as `tracer.trace` does.
        """
        recorder = self._recorder()
        try:
            passes = run_loader(self.model, specs, recorder)
        finally:
            if last is not None:
                last[:] = [recorder.received]
        records = drop_overwritten_fills(recorder.records)
        return Loaded(recorder, records, records, passes)

    def names_read(self, specs: Sequence[TensorSpec]) -> NamesRead:
        """Runs it over just these checkpoint tensors. Raises nothing that it raises."""
        recorder, refused = self._recorder(), ""
        try:
            run_loader(self.model, specs, recorder)
        except ReshardError:
            refused = recorder.received
        read = (tensor.spec.name for record in recorder.records for tensor in checkpoint_tensors(record.content))
        return NamesRead(frozenset(read), refused)

    def _recorder(self) -> Recorder:
        return Recorder(self.model, self.as_built, weightless=self._weightless)

    def instead(self, specs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        """Returns what the loader may take in place of `specs`, if it refuses these; nothing if there is no such."""
        return ()

    def leave(self, staying: Collection[Any]) -> None:
        """Takes converted modules out that stay as they are."""

    def converted(self, program: Program, loaded: Loaded, specs: Sequence[TensorSpec]) -> Program:
        """Returns a program that converts what `loaded` has written, where it arrives."""
        return program


def loader_of(model: torch.nn.Module, weightless: bool = False) -> Loader:
    """Returns the loader of a model, with the conversions that its modules need."""
    if any(map(may_convert, model.modules())):
        from sglang_reshard.trace.converting_loader import ConvertingLoader

        return ConvertingLoader(model, weightless)
    return Loader(model, weightless)


def check_names(specs: Sequence[TensorSpec]) -> None:
    """Raises Mismatch if two tensors have one name."""
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise Mismatch(f"The checkpoint tensor {spec.name} is sent twice. Send each name once.")
        seen.add(spec.name)


def run_loader(model: torch.nn.Module, specs: Sequence[TensorSpec], recorder: Recorder) -> Sequence[Pass]:
    """Records what the loader writes. Returns the passes of the run.

    Restores the model's attributes. Raises Mismatch and Unsupported as `trace`; the recorder has then what was written
    before.
    """
    given = (spec for spec in specs if not is_held_back(spec.name))
    tensors = [(spec.name, recorder.checkpoint_tensor(spec)) for spec in given]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            recorder.received = name
            yield name, tensor

    try:
        # Attributes are restored last, after the hooks on the model are gone.
        with attributes_restored(model) as changes, ExitStack() as stack:
            passes = passes_of(model)
            for one in passes:
                stack.enter_context(one.running())
            stack.enter_context(_inline_thread_pools())
            stack.enter_context(LiveWriteMode(recorder))
            model.load_weights(weights())  # type: ignore[operator]
        if recorder.failure is not None:
            raise recorder.failure
    except ReshardError as error:
        raise type(error)(f"{error} (Last tensor that the loader received: {recorder.received}.)") from error
    except Exception as error:
        raise _explained(error, recorder.received, model) from error
    for change in changes:
        _write_rebound(recorder, change)
    return passes


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
    methods = (type(getattr(module, "quant_method", None)).__name__ for module in model.modules())
    if method := next((m for m in methods if m.endswith("LinearMethod") and "Unquantized" not in m), ""):
        advice += (
            f" If they are the same, the engine has transposed or packed what it loaded ({method} does so): start it "
            "on weights in the trainer's format, without quantization="
        )
    return Mismatch(f"The model's loader rejected the tensors at {tensor}: {what}. {advice}")


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
