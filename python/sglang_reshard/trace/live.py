"""Finds a model's live tensors (parameters, buffers, tensor attributes of modules) and the storages they are on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from sglang_reshard.trace.lazy_tensor import LiveStorage

REGISTERS = ("_parameters", "_buffers", "_modules")  # attributes of every module: what it has under names
# Attributes of every module: its registers, which are walked by name, and its hooks.
OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module()))


def live_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields path and tensor of every live tensor, parameters first. One storage may come under several paths."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter.data
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer
    for path, module in model.named_modules():
        yield from tensors_among(f"{path}." if path else "", vars(module))


def tensors_among(prefix: str, attributes: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors among attributes of an object, and in lists, tuples and dicts that these are."""
    for name, value in attributes.items():
        if name in OWN_ATTRIBUTES:
            continue
        if isinstance(value, torch.Tensor):
            yield prefix + name, value
        elif isinstance(value, (list, tuple, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{prefix}{name}.{k}", item) for k, item in items if isinstance(item, torch.Tensor))


def storage_key(tensor: torch.Tensor) -> int:
    """Returns what identifies a tensor's storage: its address, or for a meta tensor that of torch's storage object.

    0 for a tensor without a storage, such as a sparse one.
    """
    try:
        storage = tensor.untyped_storage()
        return storage._cdata if tensor.device.type == "meta" else storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, other subclasses
        return 0


def live_storages(
    model: torch.nn.Module, as_built: Collection[int] = (), *, weightless: bool = False
) -> dict[int, LiveStorage]:
    """Returns every live storage by `storage_key`, named after the first path that leads to it; no two alike.

    Meta tensors are left out, unless the whole model was built on the meta device, to be traced without memory.

    as_built    keys of storages on the meta device that count as live, see `repack`
    weightless  the model was built on the meta device, and modules of it that name a device themselves are elsewhere
    """
    storages: dict[int, LiveStorage] = {}
    names: set[str] = set()
    on_meta = weightless or {p.device.type for p in model.parameters() if p.numel() > 1} == {"meta"}
    for name, tensor in live_tensors(model):
        if tensor.numel() == 0:
            continue
        key = storage_key(tensor)
        if tensor.device.type == "meta" and not on_meta and key not in as_built:
            continue
        if key and key not in storages:
            while name in names:  # of the keys 1 and "1" of a dict, for example
                name += "'"
            names.add(name)
            storages[key] = LiveStorage(name, tensor.detach())
    return storages


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one dtype and shape have the same bits."""
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def flat_view(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the whole storage of a tensor as a 1-D tensor of `dtype`."""
    storage = tensor.untyped_storage()
    numel = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (numel,), (1,))
