"""Gives a plain torch module the loader that an engine's model has. Names are those of the module's state dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.layout.names import matches_any
from sglang_reshard.memory.overlap import Written, written_once
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.shown_names import some_names
from sglang_reshard.sources.versions import VersionCounters
from sglang_reshard.trace.program import MayStay

logger = get_logger(__name__)


@dataclass
class Loads:
    """Holds the loader's options and results. Attributes of the model itself would be restored after a trace.

    ignored   patterns of names that need not be read: those of the update, and tied ones of the trainer's
    may_stay  says which tensors need not be sent
    written   (name, tensor) of all that it has written to
    """

    ignored: tuple[str, ...] = ()
    may_stay: MayStay = field(default_factory=MayStay)
    written: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def go_by(self, request: DistributedUpdateWeightsReq) -> None:
        self.ignored, self.may_stay = request.ignore, MayStay(request.frozen, request.only)

    def is_ignored(self, name: str) -> bool:
        return matches_any(name, self.ignored)


class StateDictModel(nn.Module):
    """A module whose state dict the trainer sends: parameters and persistent buffers.

    keeps_unsent  whether parameters and buffers that are not sent keep their values; else they are an error
    """

    reshard_main = "module"  # see `trace.kept`

    def __init__(self, module: nn.Module, *, strict: bool) -> None:
        super().__init__()
        self.module, self.keeps_unsent = module, not strict
        self.loads = Loads()
        self._versions = VersionCounters(())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the weights into the tensors of their names. Names that the module lacks are left to the caller.

        Of names that are one tensor in the module, all but one have to be tied in the trainer too, or to be ignored.

        Raises Mismatch for a tensor of another shape, for two that share memory and are not tied, and, unless
        `keeps_unsent`, if a tensor of the module is missing among the weights. Raises Unsupported for state that is no
        parameter and no buffer, see `get_extra_state`.
        """
        state = self.module.state_dict(keep_vars=True)
        own = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        given = [(name, tensor) for name, tensor in weights if name in state]
        for name, _ in given:
            if id(state[name]) not in own:
                raise Unsupported(
                    f"{name} is in the module's state dict but is neither a parameter nor a buffer; such state cannot "
                    "be received. Leave it out of the update"
                )
        kept = self._written_once(state, given)
        self.loads.written = [(name, state[name]) for name, _ in given if name in kept]
        for name, tensor in given:
            if name not in kept:
                continue
            target = state[name]
            if target.shape != tensor.shape:  # `copy_` would broadcast
                raise Mismatch(
                    f"{name} is sent with shape {list(tensor.shape)}, but the module's has shape {list(target.shape)}. "
                    "Build trainer and receiver modules with the same sizes"
                )
            target.data.copy_(tensor)
        self._check_rest(state, own, {id(tensor) for _, tensor in self.loads.written})

    def goes_by(self) -> bytes:
        """Returns what the loader goes by: if it changes, a trace is not used again."""
        return repr((self.loads.ignored, self.loads.may_stay)).encode()

    def count_write(self) -> None:
        """Increases the version counters of the written tensors, as `copy_` would. One call for all of it."""
        if self.loads.written:  # since the loader ran
            self._versions, self.loads.written = VersionCounters(self.loads.written), []
        self._versions.increase()

    def _written_once(self, state: Mapping[str, Any], given: Sequence[tuple[str, torch.Tensor]]) -> set[str]:
        """Returns the names to write: of tied ones the first that is not ignored. Raises Mismatch for an overlap."""
        names = sorted((name for name, _ in given), key=self.loads.is_ignored)
        # A DTensor has no address; the write to it is refused.
        entries = [Written.of(name, state[name]) for name in names if not isinstance(state[name], DTensor)]
        kept = {entries[n].name for n in written_once(entries, self._is_tied, "", "the receiver's module")}
        return kept | {name for name in names if isinstance(state[name], DTensor)}

    def _is_tied(self, _: str, other: str) -> bool:
        return self.loads.is_ignored(other)

    def _check_rest(self, state: Mapping[str, Any], own: set[int], written: set[int]) -> None:
        """`own` and `written` are ids of tensors: tied ones have several names, and one of them is sent."""
        unsent = [name for name, value in state.items() if id(value) in own and id(value) not in written]
        extra = [name for name, value in state.items() if id(value) not in own and not _is_empty(value)]
        if self.keeps_unsent:
            if unsent or extra:
                logger.info(
                    "the trainer does not send these, so the module keeps its own: %s", some_names([*unsent, *extra])
                )
            return
        unsent = [name for name in unsent if not self.loads.may_stay(name)]
        if unsent:
            raise Mismatch(
                f"the module has {some_names(unsent)}, which the trainer does not send. Send all parameters and "
                "persistent buffers (pass the module itself to update, or its state_dict), or keep the module's own "
                "values with ModuleReceiver(..., strict=False)"
            )
        if extra:
            raise Unsupported(
                "the module has extra state that is neither a parameter nor a buffer and is not sent: "
                f"{some_names(extra)}. Keep the module's own with ModuleReceiver(..., strict=False)"
            )


def _is_empty(extra_state: Any) -> bool:
    """Modules of some libraries have extra state only in some modes, and nothing in it otherwise."""
    return extra_state.numel() == 0 if isinstance(extra_state, torch.Tensor) else not extra_state
