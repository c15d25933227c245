"""Names what an update may leave as it is, if nothing that is sent reaches it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_reshard.layout.names import matches_any


@dataclass(frozen=True, slots=True)
class MayStay:
    """Says what may stay as it is, by fnmatch patterns.

    frozen  of names in the engine's model, whose parameters may stay as a whole, and of names in its own checkpoint:
            what a start fills from these tensors may stay, also where it is a part of a fused parameter
    only    of names in the engine's model; all other parameters may stay. Empty if there is no such rule
    """

    frozen: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __call__(self, name: str) -> bool:
        if matches_any(name, self.frozen):
            return True
        return bool(self.only) and not matches_any(name, self.only)

    def from_checkpoint(self, name: str) -> bool:
        """Returns whether what the tensor of this name in the engine's own checkpoint has filled may stay."""
        return matches_any(name, self.frozen)
