"""Remembers a model's attributes before its loader runs, and restores what the loader has rebound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from sglang_reshard.trace.lazy_tensor import LazyTensor
from sglang_reshard.trace.live import REGISTERS, storage_key

ABSENT = object()  # as the value of an attribute that did not exist


class Change(NamedTuple):
    """An attribute that was rebound to or from a tensor; `before` has been restored."""

    path: str
    before: Any
    after: Any


@contextmanager
def attributes_restored(model: torch.nn.Module) -> Iterator[list[Change]]:
    """Restores, at its end, the attributes of all modules and parameters of a model.

    The list that it yields has then those that were rebound to or from a tensor.
    """
    modules = [(path, vars(module)) for path, module in model.named_modules()]
    data = [(path, parameter, parameter.data) for path, parameter in model.named_parameters()]
    of_parameters = [(path, vars(parameter)) for path, parameter, _ in data]
    # torch's own containers (of hooks and the like) start with an underscore.
    containers = [
        (f"{path}.{key}" if path else key, value, _items(value))
        for path, attributes in (*modules, *of_parameters)
        for key, value in attributes.items()
        if type(value) in (list, dict, set) and not key.startswith("_")
    ]
    named = [(path, table) for path, own in modules for table in (own, *(own[register] for register in REGISTERS))]
    tables = [(path, table, dict(table)) for path, table in (*named, *of_parameters)]
    found: list[Change] = []
    try:
        yield found
    finally:
        changes: list[Change] = []
        for path, table, before in tables:
            changes += _restore_table(path, table, before)
        for path, container, items in containers:
            changes += _restore_container(path, container, items)
        for path, parameter, tensor in data:
            now = parameter.data
            if _location(now) != _location(tensor):
                parameter.data = tensor
                changes.append(Change(f"{path}.data", tensor, now))
        found += [c for c in changes if _is_rebound_tensor(c)]


def _restore_table(path: str, table: dict[str, Any], old: dict[str, Any]) -> Iterator[Change]:
    changed = [k for k in table if k not in old or table[k] is not old[k]]
    deleted = [k for k in old if k not in table]
    changed += deleted
    for key in changed:
        before, after = old.get(key, ABSENT), table.get(key, ABSENT)
        if before is ABSENT:
            del table[key]
        else:
            table[key] = before
        yield Change(f"{path}.{key}" if path else key, before, after)
    if deleted:
        # In their place, too: the order of modules is the order of their parameters.
        table.clear()
        table.update(old)


def _restore_container(path: str, container: Any, old: list[Any]) -> Iterator[Change]:
    """Restores a list, set or dictionary. Yields the lazy tensors that it had."""
    items = _items(container)
    # By identity, not equality: the items may be tensors.
    if len(items) == len(old) and all(map(_same, old, items)):
        return
    if isinstance(container, list):
        container[:] = old
    else:
        container.clear()
        container.update(old)
    for item in items:
        after = item[1] if isinstance(container, dict) else item
        if isinstance(after, LazyTensor):
            yield Change(path, ABSENT, after)


def _items(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(x is y for x, y in zip(a, b, strict=True))
    return a is b


def _is_rebound_tensor(change: Change) -> bool:
    before, after = change.before, change.after
    if isinstance(after, LazyTensor):
        return True
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        # From None to a tensor of the loader's own, a flag, a counter: no weights are in it.
        return False
    return _location(before) != _location(after)


def _location(tensor: torch.Tensor) -> tuple[Any, ...]:
    begin = tensor.data_ptr() if tensor.device.type != "meta" else (storage_key(tensor), tensor.storage_offset())
    return begin, tuple(tensor.shape), tensor.stride(), tensor.dtype
