"""Where tensors lie in memory, compared for tens of thousands of them without Python code for each."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

_READ = (torch.Tensor.data_ptr, operator.attrgetter("shape"), torch.Tensor.stride, operator.attrgetter("dtype"))


class Places:
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

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors lie exactly where those did, in their order."""
        if len(tensors) != self._count:
            return False
        try:
            with torch._C.DisableTorchFunctionSubclass():
                # Value by value, never a list of them: new lists of shapes would set the garbage collector off.
                return all(all(map(operator.eq, map(read, tensors), known)) for read, known in self._known)
        except RuntimeError:  # one of them is not strided any more, and has no address
            return False
