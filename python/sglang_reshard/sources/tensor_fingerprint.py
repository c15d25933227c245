"""Where tensors lie in memory, compared for tens of thousands of them without Python code for each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

_READ = (
    torch.Tensor.data_ptr,
    operator.attrgetter("shape"),
    torch.Tensor.stride,
    operator.attrgetter("dtype"),
    torch.Tensor.is_neg,  # a view of the same place, and not of the same values
)


class TensorFingerprint:
    """Address, shape, strides and dtype of strided tensors, as they were. Keeps none of them alive."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._count = len(tensors)
        self._known = []
        # A subclass's own __torch_function__ would be Python code for each tensor.
        with torch._C.DisableTorchFunctionSubclass():
            for read in _READ:
                alike: dict[object, object] = {}  # few shapes among many tensors: less for the garbage collector
                found = list(map(read, tensors))
                self._known.append((read, list(map(alike.setdefault, found, found))))
        self._addresses = self._known[0][1]
        self._guards = _guards(tensors)

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors lie exactly where those did, in their order."""
        if len(tensors) != self._count:
            return False
        try:
            with torch._C.DisableTorchFunctionSubclass():
                if self._guards is not None and self._guards.check(*tensors):
                    return all(map(operator.eq, map(torch.Tensor.data_ptr, tensors), self._addresses))
                # Value by value, never a list of them: new lists of shapes would set the garbage collector off.
                return all(all(map(operator.eq, map(read, tensors), known)) for read, known in self._known)
        except RuntimeError:  # one of them is not strided any more, and has no address
            return False


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    """torch.compile's own check of all but addresses, in one pass; None where this torch has it not.

    It says no to more than matters here (a gradient that is required now, another mode), and then the slow
    way decides.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        guards: Any = TensorGuards  # its stub names other types than it takes
        return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except Exception:  # private to torch: whatever it raises, we do without
        return None
