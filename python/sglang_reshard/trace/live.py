"""The live tensors of a model: parameters, buffers and tensors kept as plain attributes of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from sglang_reshard.trace.buffers import Storage

# What every module has: its registers, which are walked by name, and its hooks.
OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


def live_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor of every live tensor, parameters first; one storage may come under several paths."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.data
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in OWN_ATTRIBUTES:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, (list, tuple, dict)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in items:
                    if isinstance(item, torch.Tensor):
                        yield f"{name}.{key}", item


def live_signature(model: torch.nn.Module) -> int:
    """Changes when a live tensor was moved, reshaped, added or removed: then trace again.

    Comparable within one process only. What the tensors hold does not enter into it, and neither does a second
    path to a tensor: MLA keeps one more to a parameter from its first forward on.
    """
    return signature_of(live_tensors(model))


def signature_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """The signature of a model with these live tensors."""
    first_path: dict[tuple[object, ...], str] = {}
    for path, t in tensors:
        if t.layout is torch.strided:
            first_path.setdefault((t.data_ptr(), tuple(t.shape), t.stride(), t.dtype), path)
    return hash(tuple(first_path.items()))  # of a tuple, so that the order counts


def storage_key(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from all others: its address; 0 when it has none of its own.

    A meta tensor's storage has no address, and goes by that of torch's object for it.
    """
    try:
        storage = tensor.untyped_storage()
        return storage._cdata if tensor.device.type == "meta" else storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, other subclasses
        return 0


def live_storages(model: torch.nn.Module) -> dict[int, Storage]:
    """Every live storage by `storage_key`, named after the first path that leads to it.

    A meta tensor among others holds no weights. A model whose parameters all are meta tensors, but for single
    elements, is one to be traced without memory.
    """
    storages: dict[int, Storage] = {}
    weightless = is_weightless(model)
    for name, tensor in live_tensors(model):
        if (tensor.device.type == "meta" and not weightless) or tensor.numel() == 0:
            continue
        key = storage_key(tensor)
        if key and key not in storages:
            numel = tensor.untyped_storage().nbytes() // tensor.element_size()
            storages[key] = Storage(name, tensor.detach(), numel)
    return storages


def is_weightless(model: torch.nn.Module) -> bool:
    """Whether it was built on the meta device."""
    devices = {p.device.type for p in model.parameters() if p.numel() > 1}
    return devices == {"meta"}


def flat(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole storage of a tensor as one dimension of `dtype`."""
    storage = tensor.untyped_storage()
    numel = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (numel,), (1,))
