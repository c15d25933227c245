"""The target of an engine rank's updates: a model, as its own loader does, or tensors as they are sent. Its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_reshard.derived import DerivedState
from sglang_reshard.engine.unread import left_alone_remark
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.layout.regions import TensorSpec, aligned
from sglang_reshard.plan import RankDemand, ReadPlan, TensorIndex, unread_tensors
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.trace.loader import NamesRead
from sglang_reshard.trace.program import MayStay, Program, Step, torch_dtype
from sglang_reshard.trace.tracer import names_read, trace

if TYPE_CHECKING:
    from sglang_reshard.trace.stock_load import EngineStart


class Target:
    """The target of updates.

    live    requests are served from the memory that programs write
    remark  for the report of an update that has been written; empty if there is nothing to say
    """

    live: bool = False

    @property
    def remark(self) -> str:
        return ""

    def placement(self) -> bytes:
        """Returns what programs depend on in addition to the memory that they write: where experts are."""
        return b""

    def signature(self) -> int:
        """Returns a number that changes when a program is no longer valid. Raises Unsupported."""
        return 0

    def program(self, specs: Sequence[TensorSpec], may_stay: MayStay) -> Program:
        """Returns the program that writes the tensors of a checkpoint. Raises Mismatch and Unsupported."""
        raise NotImplementedError

    def names_read(self, specs: Sequence[TensorSpec]) -> NamesRead:
        """Returns which of these names a program would read."""
        raise NotImplementedError

    def renew(self, *, model_ran: bool) -> None:
        """Must be called when new weights are live.

        model_ran  code of the model may have run since `signature` was called
        """


class TracedModel(Target):
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
        self._placement = placement
        self._derived = DerivedState(model, addresses_stay)

    @property
    def remark(self) -> str:
        return self._derived.remark

    def placement(self) -> bytes:
        return self._placement()

    def signature(self) -> int:
        return hash((self._derived.signature(), self.placement()))

    def program(self, specs: Sequence[TensorSpec], may_stay: MayStay) -> Program:
        return trace(self._model, specs, self._start, may_stay=may_stay)

    def names_read(self, specs: Sequence[TensorSpec]) -> NamesRead:
        return names_read(self._model, specs)

    def renew(self, *, model_ran: bool) -> None:
        """Drops what forward passes have derived from the old weights, or computes it again."""
        self._derived.renew(model_ran=model_ran)


class ReceivedAdapter(Target):
    """Tensors as the trainer sends them, whole, in separate memory: tensors that are not model parameters.

    Nothing is served from this memory: an update can still fail without consequences until `use`. The memory is kept
    for the next update.

    tensors  name -> tensor, of the layout that was allocated last, all in one allocation
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._specs = device, tuple[TensorSpec, ...]()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.tensors: dict[str, torch.Tensor] = {}

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Raises Mismatch for tensors that cannot be used."""

    def use(self) -> None:
        """Applies the tensors. Called on every engine rank, once all ranks have received and verified them."""
        raise NotImplementedError

    def program(self, specs: Sequence[TensorSpec], may_stay: MayStay) -> Program:
        self.check(specs)
        self.tensors, self._memory = {}, torch.empty(0, dtype=torch.uint8)  # freed first
        self._specs, nbytes = tuple(specs), sum(aligned(spec.nbytes) for spec in specs)
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.tensors = self._within(self._memory)
        flat = {name: tensor.view(-1) for name, tensor in self.tensors.items()}
        shapes = {spec.name: tuple(spec.shape) for spec in specs}
        return Program.whole(shapes, flat, (Step("", "use", self.use),))

    def on_host(self) -> dict[str, torch.Tensor]:
        """Returns the tensors in host memory: copies of all at once, or these tensors if they are there."""
        return self._within(self._memory.cpu()) if runtime().on_gpu(self._memory) else self.tensors

    def _within(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = memory.split([aligned(spec.nbytes) for spec in self._specs])
        return {
            spec.name: part[: spec.nbytes].view(torch_dtype(spec)).view(spec.shape)
            for spec, part in zip(self._specs, parts, strict=True)
        }

    def names_read(self, specs: Sequence[TensorSpec]) -> NamesRead:
        return NamesRead(frozenset(spec.name for spec in specs), "")


@dataclass(frozen=True, slots=True)
class LoaderNames:
    """The names of one source layout's tensors, in its order, see `engine.names`.

    layout  content hash of the layout; empty as long as no other names were looked for
    given   as the trainer has them
    names   as the loader reads them; empty if those are the names that were given
    hint    what to do about names that the loader does not read, for error messages
    digest  of `names`; empty if there are none
    remark  says which names were changed, for the trainer's report; empty if none was
    """

    layout: str = ""
    given: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    hint: str = ""
    digest: str = ""
    remark: str = ""

    def trainer_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the trainer's names of the tensors that the loader reads as `names`."""
        given = dict(zip(self.names, self.given, strict=True)) if self.names else {}
        return tuple(given.get(name, name) for name in names)


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """An engine rank's program and read plan.

    Valid for one source layout (by content hash), its names for the loader, one rule for kept parameters, one set of
    live addresses, one set of trainer ranks' hosts and GPUs, and one set of trainer ranks whose memory cannot be
    mapped.
    """

    layout: str
    signature: int
    may_stay: MayStay
    names: LoaderNames
    trainers: tuple[object, ...]
    tensor_index: TensorIndex
    program: Program
    read_plan: ReadPlan
    demand: RankDemand

    def is_current(self, request: DistributedUpdateWeightsReq, signature: int, names: LoaderNames) -> bool:
        return self.is_traced(request, signature, names) and self.trainers == trainers_of(request)

    def is_traced(self, request: DistributedUpdateWeightsReq, signature: int, names: LoaderNames) -> bool:
        known = self.layout, self.signature, self.may_stay, self.names.digest
        return known == (request.layout, signature, MayStay(request.frozen, request.only), names.digest)

    @property
    def remark(self) -> str:
        """Names the parameters that the program does not write, for the trainer's report; empty if there are none."""
        return left_alone_remark(self.program) if self.program.left_alone else ""

    def unread(self, demands: Sequence[RankDemand]) -> tuple[str, ...]:
        """Returns the names, as the trainer has them, of tensors that no engine rank reads."""
        return self.names.trainer_names(unread_tensors(self.tensor_index, demands))


def trainers_of(request: DistributedUpdateWeightsReq) -> tuple[object, ...]:
    return request.trainer_hosts, request.trainer_devices
