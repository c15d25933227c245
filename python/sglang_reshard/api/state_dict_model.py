"""Gives a plain torch module the loader that an engine's model has. Names are those of the module's state dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sglang_reshard.errors import Mismatch, Unsupported
from sglang_reshard.observability.logs import get_logger

logger = get_logger(__name__)
_SHOWN_NAMES = 5


class StateDictModel(nn.Module):
    """A module whose state dict is what the trainer sends: parameters and persistent buffers.

    keeps_unsent  whether parameters and buffers that are not sent keep their values; else they are an error
    """

    reshard_main = "module"  # see `trace.kept`

    def __init__(self, module: nn.Module, *, strict: bool) -> None:
        super().__init__()
        self.module, self.keeps_unsent = module, not strict

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the weights into the tensors of their names. Names that the module lacks are left to the caller.

        Raises Mismatch for a tensor of another shape, and, unless `keeps_unsent`, if a tensor of the module is missing
        among the weights. Raises Unsupported for state that is no parameter and no buffer, see `get_extra_state`.
        """
        state = self.module.state_dict(keep_vars=True)
        own = {id(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}
        written: set[int] = set()
        for name, tensor in weights:
            target = state.get(name)
            if target is None:
                continue
            if id(target) not in own:
                raise Unsupported(
                    f"{name} is in the module's state dict and is no parameter and no buffer of it: such state cannot "
                    "be received. Leave it out of the update"
                )
            if target.shape != tensor.shape:  # `copy_` would broadcast
                raise Mismatch(
                    f"{name} is sent as {list(tensor.shape)}, and the module's is {list(target.shape)}. Give trainer "
                    "and receiver modules of the same sizes"
                )
            target.data.copy_(tensor)
            written.add(id(target))
        self._check_rest(state, own, written)

    def _check_rest(self, state: Mapping[str, Any], own: set[int], written: set[int]) -> None:
        """`own` and `written` are ids of tensors: tied ones have several names, of which one is sent."""
        unsent = [name for name, value in state.items() if id(value) in own and id(value) not in written]
        extra = [name for name, value in state.items() if id(value) not in own and not _is_empty(value)]
        if self.keeps_unsent:
            if unsent or extra:
                logger.info("not sent, so the module keeps its own: %s", _some([*unsent, *extra]))
            return
        if unsent:
            raise Mismatch(
                f"the module has {_some(unsent)}, which the trainer does not send. Send all parameters and persistent "
                "buffers (pass the module itself to update, or its state_dict), or keep the module's own values with "
                "ModuleReceiver(..., strict=False)"
            )
        if extra:
            raise Unsupported(
                f"the module has {_some(extra)}, state that is no parameter and no buffer, which is not sent. Keep the "
                "module's own with ModuleReceiver(..., strict=False)"
            )


def _is_empty(extra_state: Any) -> bool:
    """Modules of some libraries have extra state only in some modes, and nothing in it otherwise."""
    return extra_state.numel() == 0 if isinstance(extra_state, torch.Tensor) else not extra_state


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more}"
