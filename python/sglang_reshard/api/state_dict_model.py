"""Gives any torch module the loader that an engine's model has: a weight goes to the entry of its state dict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sglang_reshard.errors import Mismatch
from sglang_reshard.sources.versions import VersionCounters
from sglang_reshard.transports.overlap import Written, written_once


@dataclass
class Loads:
    """What the loader goes by, and what it has done. Attributes of the model itself would be restored after a trace.

    ignored  patterns of names that need not be read: those of the update, and tied ones of the trainer's
    written  (name, tensor) of all that it has written to
    """

    ignored: tuple[str, ...] = ()
    written: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def is_ignored(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)


class StateDictModel(nn.Module):
    """A module with `load_weights`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.loads = Loads()
        self._versions = VersionCounters(())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes weights to the entries of their names, and leaves out those that the module has no entry for.

        Of names that are one tensor in the module, all but one have to be tied in the trainer too, or to be ignored.
        Raises Mismatch, naming both, for other entries that share memory, and for shapes that differ.
        """
        state = self.module.state_dict(keep_vars=True)
        given = [(name, tensor) for name, tensor in weights if name in state]  # of others the caller is told by name
        given.sort(key=lambda pair: self.loads.is_ignored(pair[0]))
        # A DTensor has no address; the write to it is refused.
        entries = [Written.of(name, state[name]) for name, _ in given if not isinstance(state[name], DTensor)]
        kept = {entries[n].name for n in written_once(entries, self._is_tied, "", "the receiver's module")}
        kept |= {name for name, _ in given if isinstance(state[name], DTensor)}
        self.loads.written = [(name, state[name]) for name, _ in given if name in kept]
        for name, tensor in given:
            if name not in kept:
                continue
            if state[name].shape != tensor.shape:
                raise Mismatch(
                    f"{name} has the shape {tuple(state[name].shape)} in the receiver's module and "
                    f"{tuple(tensor.shape)} in the trainer"
                )
            state[name].data.copy_(tensor)

    def _is_tied(self, _: str, other: str) -> bool:
        return self.loads.is_ignored(other)

    def goes_by(self) -> bytes:
        """Returns what the loader goes by: if it changes, a trace is not used again."""
        return "\0".join(self.loads.ignored).encode()

    def count_write(self) -> None:
        """Increases the version counters of what has been written, as `copy_` would. One call for all of it."""
        if self.loads.written:  # since the loader ran
            self._versions, self.loads.written = VersionCounters(self.loads.written), []
        self._versions.increase()
