"""What a loader changes besides bytes: attributes of modules and parameters. Puts them back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_reshard.trace.lazy_tensor import LazyTensor
from sglang_reshard.trace.live import storage_key

_TABLES = ("_parameters", "_buffers", "_modules")


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


class Change(NamedTuple):
    """An attribute was rebound; `before` is in place again."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class _Namespace:
    """A dictionary of attributes as it was."""

    path: str
    table: dict[str, Any]
    before: dict[str, Any]

    def restore(self) -> Iterator[Change]:
        now = self.table
        changed = [k for k in now if k not in self.before or now[k] is not self.before[k]]
        changed += [k for k in self.before if k not in now]
        for key in changed:
            before, after = self.before.get(key, ABSENT), now.get(key, ABSENT)
            if before is ABSENT:
                del now[key]
            else:
                now[key] = before
            yield Change(f"{self.path}.{key}" if self.path else key, before, after)


@dataclass(frozen=True, slots=True)
class _Container:
    """A list, set or dictionary that an attribute holds, as it was."""

    path: str
    container: Any
    before: Any

    def restore(self) -> Iterator[Change]:
        now = self.container
        items = list(now.items()) if isinstance(now, dict) else list(now)
        # By identity, not equality: the items may be tensors.
        if len(items) == len(self.before) and all(map(_same, self.before, items)):
            return
        if isinstance(now, list):
            now[:] = self.before
        else:
            now.clear()
            now.update(self.before)
        for item in items:
            after = item[1] if isinstance(now, dict) else item
            if isinstance(after, LazyTensor):
                yield Change(self.path, ABSENT, after)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return all(x is y for x, y in zip(a, b, strict=True))
    return a is b


class Snapshot:
    """All attributes of a model, from before the loader ran."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._namespaces: list[_Namespace] = []
        self._containers: list[_Container] = []
        self._data: list[tuple[str, torch.nn.Parameter, torch.Tensor]] = []
        for path, module in model.named_modules():
            attributes = vars(module)
            self._keep(path, attributes)
            for table in _TABLES:
                self._namespaces.append(_Namespace(path, attributes[table], dict(attributes[table])))
        for path, parameter in model.named_parameters():
            self._data.append((path, parameter, parameter.data))
            self._keep(path, vars(parameter))

    def _keep(self, path: str, attributes: dict[str, Any]) -> None:
        self._namespaces.append(_Namespace(path, attributes, dict(attributes)))
        for key, value in attributes.items():
            # torch's own tables (hooks and the like) start with an underscore.
            if type(value) in (list, dict, set) and not key.startswith("_"):
                before = list(value.items()) if isinstance(value, dict) else list(value)
                self._containers.append(_Container(f"{path}.{key}" if path else key, value, before))

    def restore(self) -> list[Change]:
        """Put everything back; what was rebound to or from a tensor is told."""
        changes: list[Change] = []
        for namespace in self._namespaces:
            changes += namespace.restore()
        for container in self._containers:
            changes += container.restore()
        for path, parameter, data in self._data:
            now = parameter.data
            if _place(now) != _place(data):
                parameter.data = data
                changes.append(Change(f"{path}.data", data, now))
        return [c for c in changes if _is_rebound_tensor(c)]


def _is_rebound_tensor(change: Change) -> bool:
    before, after = change.before, change.after
    if isinstance(after, LazyTensor):
        return True
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        # None to a tensor of its own making, a flag, a counter: no weights are in it.
        return False
    return _place(before) != _place(after)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    begin = tensor.data_ptr() if tensor.device.type != "meta" else (storage_key(tensor), tensor.storage_offset())
    return begin, tuple(tensor.shape), tensor.stride(), tensor.dtype


class TensorSlots:
    """Where a model keeps its tensors, so that a step cannot rebind them to other memory."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._slots: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for module in model.modules():
            tables = vars(module)
            for table in (tables, tables["_parameters"], tables["_buffers"]):
                self._slots += [(table, k, v) for k, v in table.items() if isinstance(v, torch.Tensor)]

    def keep_addresses(self) -> None:
        """Write what was rebound into the old memory, and bind that again."""
        for table, key, tensor in self._slots:
            now = table.get(key)
            if now is tensor or not isinstance(now, torch.Tensor):
                continue
            if now.shape == tensor.shape and now.dtype == tensor.dtype:
                tensor.data.copy_(now.data)
                table[key] = tensor
