"""Where a model may keep what its first forward pass computes from a weight: one layer for each place.

`deriving` has the usual places, this file the others.
"""

from __future__ import annotations

import collections
import functools
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from support import imported_state
from support.deriving import SIZE, Linear
from support.imported_state import scale_once


class OnParameter(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.weight, "_wide"):
            self.weight._wide = self.weight.float()
        return x @ self.weight._wide


class Number(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._largest: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._largest is None:
            self._largest = self.weight.float().abs().max().item()
        return x * self._largest


class WholeNumber(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._count: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._count is None:
            self._count = int(self.weight.float().mul(100).sum().item())
        return x * self._count


class NumberWithFlag(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._scale, self._known = 1.0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._known:
            self._scale = self.weight.float().abs().max().item()
            self._known = True
        return x * self._scale


class Numbers(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._rows: list[float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._rows is None:
            self._rows = self.weight.float().sum(1).tolist()
        return x * torch.tensor(self._rows)


class InNumpy(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._array: np.ndarray | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._array is None:
            self._array = self.weight.detach().float().numpy().copy()
        return x @ torch.from_numpy(self._array)


class _Slots:
    __slots__ = ("wide",)

    def __init__(self) -> None:
        self.wide: torch.Tensor | None = None


class InSlots(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._kept = _Slots()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kept.wide is None:
            self._kept.wide = self.weight.float()
        return x @ self._kept.wide


@dataclass(frozen=True, slots=True)
class _Frozen:
    wide: torch.Tensor
    name: str = "wide"


class InFrozenDataclass(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._kept: _Frozen | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kept is None:
            self._kept = _Frozen(self.weight.float())
        return x @ self._kept.wide


class _Pair(NamedTuple):
    wide: torch.Tensor
    of: str


class InNamedTuple(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[_Pair] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._pairs:
            self._pairs.append(_Pair(self.weight.float(), "weight"))
        return x @ self._pairs[0].wide


class InDeque(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._queue: collections.deque[torch.Tensor] = collections.deque()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._queue:
            self._queue.append(self.weight.float())
        return x @ self._queue[0]


class InNestedDictionary(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._by_kind: dict[str, dict[torch.dtype, torch.Tensor]] = {"wide": {}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self._by_kind["wide"].get(x.dtype)
        if wide is None:
            wide = self._by_kind["wide"].setdefault(x.dtype, self.weight.to(x.dtype))
        return x @ wide


class InNamespace(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._kept = types.SimpleNamespace(wide=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kept.wide is None:
            self._kept.wide = self.weight.float()
        return x @ self._kept.wide


class InThread(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._local = threading.local()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self._local, "wide"):
            self._local.wide = self.weight.float()
        return x @ self._local.wide


class InLambda(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._apply_once: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._apply_once is None:
            wide = self.weight.float()
            self._apply_once = lambda y: y @ wide
        return self._apply_once(x)


class InPartial(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._multiply: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._multiply is None:
            self._multiply = functools.partial(torch.matmul, other=self.weight.float())
        return self._multiply(x)


class InGenerator(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._stream: Any = None

    def _same(self, wide: torch.Tensor) -> Any:
        while True:
            yield wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._stream is None:
            self._stream = self._same(self.weight.float())
        return x @ next(self._stream)


class InClass(Linear):
    wide: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if InClass.wide is None:
            InClass.wide = self.weight.float()
        return x @ InClass.wide


class InDictionaryOfClass(Linear):
    by_layer: ClassVar[dict[int, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if id(self) not in self.by_layer:
            self.by_layer[id(self)] = self.weight.float()
        return x @ self.by_layer[id(self)]


_BY_LAYER: weakref.WeakKeyDictionary[nn.Module, torch.Tensor] = weakref.WeakKeyDictionary()


class InWeakDictionary(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self not in _BY_LAYER:
            _BY_LAYER[self] = self.weight.float()
        return x @ _BY_LAYER[self]


_LARGEST: float | None = None


def _largest(weight: torch.Tensor) -> float:
    global _LARGEST
    if _LARGEST is None:
        _LARGEST = weight.float().abs().max().item()
    return _LARGEST


class InGlobalNumber(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * _largest(self.weight)


@functools.lru_cache
def _sum(weight: torch.Tensor) -> float:
    return weight.float().sum().item()


class InCachedNumber(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * _sum(self.weight)


class InFunction(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ _kept_on_function(self.weight)


def _kept_on_function(weight: torch.Tensor) -> torch.Tensor:
    if not hasattr(_kept_on_function, "_wide"):
        _kept_on_function._wide = weight.float()  # type: ignore[attr-defined]
    return _kept_on_function._wide  # type: ignore[attr-defined, no-any-return]


def _kept_in_default(weight: torch.Tensor, kept: dict[str, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    return kept.setdefault("wide", weight.float())


class InDefault(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ _kept_in_default(self.weight)


class InImportedModule(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * scale_once(self.weight)


class InHook(Linear):
    def __init__(self) -> None:
        super().__init__()
        wide: torch.Tensor | None = None

        def multiply(layer: Any, args: Any) -> Any:
            nonlocal wide
            if wide is None:
                wide = layer.weight.float()
            return (args[0] @ wide,)

        self.register_forward_pre_hook(multiply)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class InNewModule(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "fused"):
            fused = nn.Linear(SIZE, SIZE, bias=False)
            fused.weight.data.copy_(self.weight.t())
            self.add_module("fused", fused)
        return self.fused(x)


class InNewParameter(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "wide" not in self._parameters:
            self.register_parameter("wide", nn.Parameter(self.weight.float(), requires_grad=False))
        return x @ self.wide


class InNewForward(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.weight.float()
        self.forward = lambda y: y @ wide  # type: ignore[method-assign]
        return x @ wide


class InReadyBuffer(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_wide", torch.zeros(SIZE, SIZE), persistent=False)
        self._ready = False

    def refresh(self) -> None:
        self._wide.view(SIZE, SIZE).copy_(self.weight.data.t())
        self._ready = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._ready:
            self.refresh()
        return x @ self._wide


class InPaddedBuffer(InReadyBuffer):
    def __init__(self) -> None:
        super().__init__()
        self._wide = torch.zeros(SIZE + 2, SIZE)

    def refresh(self) -> None:
        torch.mul(self.weight, 2, out=self._wide[:SIZE])
        self._ready = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._ready:
            self.refresh()
        return x @ self._wide[:SIZE]


class InReplacedBuffer(InReadyBuffer):
    def refresh(self) -> None:
        self._wide, self._ready = self.weight.float() * 3, True


class InCountedBuffer(InReadyBuffer):
    """Not a flag but a count says that it was computed."""

    def __init__(self) -> None:
        super().__init__()
        self._passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._passes == 0:
            self._wide.copy_(self.weight)
        self._passes += 1
        return x @ self._wide


class FoldedByItems(Linear):
    def __init__(self) -> None:
        super().__init__()
        self._folded = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._folded:
            with torch.no_grad():
                self.weight[:] = self.weight * 2
            self._folded = True
        return x @ self.weight.float()


class FoldedByName(Linear):
    """The state is a word, and no flag that was False."""

    def __init__(self) -> None:
        super().__init__()
        self._state = "loaded"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._state == "loaded":
            with torch.no_grad():
                self.weight.mul_(2)
            self._state = "folded"
        return x @ self.weight.float()


class FoldedFromOutside(Linear):
    """Nothing on the layer says that its weight was changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self not in _FOLDED:
            with torch.no_grad():
                self.weight[:] = self.weight * 2
            _FOLDED.add(self)
        return x @ self.weight.float()


_FOLDED: weakref.WeakSet[nn.Module] = weakref.WeakSet()

PATTERNS = tuple(kind for kind in vars().copy().values() if isinstance(kind, type) and issubclass(kind, Linear))[1:]


def forget() -> None:
    """Clears what layers keep outside of themselves, as in a new process."""
    global _LARGEST
    InClass.wide = _LARGEST = imported_state._scale = None
    for kept in (InDictionaryOfClass.by_layer, _BY_LAYER, _FOLDED, vars(_kept_on_function)):
        kept.clear()
    (_kept_in_default.__defaults__ or ())[0].clear()
    _sum.cache_clear()
