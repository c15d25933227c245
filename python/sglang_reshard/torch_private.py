"""Lists the private names of torch that this package needs, and checks at import that they exist.

A DTensor has its local tensor, its spec and its root mesh under private names only. If torch has renamed one, the
import fails with the name and with torch's version, and no update begins.

Other private names are optional, and their users handle a missing one: FSDP1's and FSDP2's state (`sources.fsdp1`,
`sources.fsdp`), the faster comparisons of `sources.memory_identity`.
"""
# ruff: noqa: E402 (the list is checked before anything of it is imported)

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator

import torch

TESTED = "2.10 to 2.14"  # 2.11 by all tests, 2.10 and 2.14 by the unit tests of `sources`

NEEDED = (
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._disabled_torch_function_impl",
    "torch._foreach_copy_",
    "torch.Tensor._make_subclass",
    "torch.Tensor._make_wrapper_subclass",
    "torch.UntypedStorage._cdata",
    "torch.UntypedStorage._new_using_fd_cpu",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.distributed.tensor.DTensor._spec",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor.placement_types._StridedShard",
    "torch.ops.aten._to_copy.default",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
)
NEEDED_ON_GPUS = (
    "torch._C._construct_storage_from_data_pointer",
    "torch._C._cuda_hasPrimaryContext",
    "torch.cuda.memory._snapshot",
)


def missing(names: Iterable[str]) -> list[str]:
    """Returns those of `names`, full ones of modules' attributes or of their classes' attributes, that torch lacks."""
    return [name for name in names if not _has(name)]


def require(names: Iterable[str]) -> None:
    """Raises ImportError if this torch lacks one of `names`."""
    if lacking := missing(names):
        raise ImportError(
            f"torch {torch.__version__} is not supported: it has no {', '.join(lacking)}. sglang-reshard needs torch "
            f"2.10 or newer, and is tested with {TESTED}; install one of these"
        )


def _has(name: str) -> bool:
    """Imports the longest part of the name that is a module, and looks for the rest in it."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for attribute in parts[count:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


require(NEEDED)
if torch.version.cuda:
    require(NEEDED_ON_GPUS)

from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "StridedShard",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
]


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers of a module's state dict, by name."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
