"""What an operation allocates at most."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestResult(TorchDispatchMode):
    """The largest new tensor, bytes, that any operation makes."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
        known = {a.untyped_storage().data_ptr() for a in given if isinstance(a, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result
