"""The target of an engine rank's updates: a model, as its own loader does, or tensors as they are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_reshard.derived import DerivedState
from sglang_reshard.layout.regions import TensorSpec
from sglang_reshard.trace.loader import NamesRead
from sglang_reshard.trace.program import MayStay, Program, Step, torch_dtype
from sglang_reshard.trace.tracer import names_read, trace

if TYPE_CHECKING:
    from sglang_reshard.trace.stock_load import EngineStart


class Target(Protocol):
    """The target of updates.

    live  requests are served from the memory that programs write
    """

    @property
    def live(self) -> bool: ...

    @property
    def remark(self) -> str:
        """For the report of an update that has been written; empty if there is nothing to say."""

    def placement(self) -> bytes:
        """Returns what programs depend on in addition to the memory that they write: where experts are."""

    def signature(self) -> int:
        """Returns a number that changes when a program is no longer valid. Raises Unsupported."""

    def program(self, specs: Sequence[TensorSpec], may_stay: MayStay) -> Program:
        """Returns the program that writes the tensors of a checkpoint. Raises Mismatch and Unsupported."""

    def names_read(self, specs: Sequence[TensorSpec]) -> NamesRead:
        """Returns which of these names a program would read."""

    def renew(self, *, model_ran: bool) -> None:
        """Must be called when new weights are live.

        model_ran  code of the model may have run since `signature` was called
        """


class TracedModel:
    """A model that loads itself, and from whose parameters requests are served."""

    live = True

    def __init__(
        self,
        model: torch.nn.Module,
        placement: Callable[[], bytes] = lambda: b"",
        start: Callable[[], EngineStart] | None = None,
        addresses_stay: bool = False,
    ) -> None:
        """Must be called before the model's first forward pass, unless `derived.remember_loaded` was.

        placement       see `Target`
        start           returns how the engine was started, see `trace.tracer.trace`
        addresses_stay  CUDA graphs hold the addresses of the model's tensors
        """
        self._model, self._start = model, start
        self.placement = placement
        self._derived = DerivedState(model, addresses_stay)

    @property
    def remark(self) -> str:
        return self._derived.remark

    def signature(self) -> int:
        return hash((self._derived.signature(), self.placement()))

    def program(self, specs: Sequence[TensorSpec], may_stay: MayStay) -> Program:
        return trace(self._model, specs, self._start, may_stay=may_stay)

    def names_read(self, specs: Sequence[TensorSpec]) -> NamesRead:
        return names_read(self._model, specs)

    def renew(self, *, model_ran: bool) -> None:
        """Drops what forward passes have derived from the old weights, or computes it again."""
        self._derived.renew(model_ran=model_ran)


class ReceivedAdapter:
    """Tensors as the trainer sends them, whole, in separate memory: tensors that are not model parameters.

    Nothing is served from this memory: an update can still fail without consequences until `use`. The memory is kept
    for the next update.

    tensors  name -> tensor, of the layout that was allocated last
    """

    live, remark = False, ""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.tensors: dict[str, torch.Tensor] = {}

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Raises Mismatch for tensors that cannot be used."""

    def use(self) -> None:
        """Applies the tensors. Called on every engine rank, once all ranks have received and verified them."""
        raise NotImplementedError

    def placement(self) -> bytes:
        return b""

    def signature(self) -> int:
        return 0

    def program(self, specs: Sequence[TensorSpec], may_stay: MayStay) -> Program:
        self.check(specs)
        self.tensors = {}  # freed first
        self.tensors = {
            spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec), device=self._device) for spec in specs
        }
        flat = {name: tensor.view(-1) for name, tensor in self.tensors.items()}
        shapes = {spec.name: tuple(spec.shape) for spec in specs}
        return Program.whole(shapes, flat, (Step("", "use", self.use),))

    def names_read(self, specs: Sequence[TensorSpec]) -> NamesRead:
        return NamesRead(frozenset(spec.name for spec in specs), "")

    def renew(self, *, model_ran: bool) -> None:
        """Nothing is computed from these tensors but by `use`."""
