"""Layers that compute something from their weight once. `derived_patterns` has all places where it may be kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SIZE = 6


@dataclass(frozen=True, slots=True)
class Frozen:
    c: object


class Linear(nn.Module):
    """y = x @ f(weight); what f returns is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, SIZE, dtype=torch.bfloat16))

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


class ByMethod(Linear):
    """The method that computes it needs no input, and the forward pass uses its input before."""

    def __init__(self) -> None:
        super().__init__()
        self._padded: torch.Tensor | None = None

    def pad(self) -> None:
        self._padded = nn.functional.pad(self.weight.float(), (0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        if self._padded is None:
            self.pad()
        return x @ self._padded


class Folded(Linear):
    """The first forward pass scales the weight in place, once."""

    def __init__(self) -> None:
        super().__init__()
        self.folded = False

    def fold(self) -> None:
        if not self.folded:
            self.weight.data.mul_(0.5)
            self.folded = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fold()
        return x @ self.weight.float()


class FoldedByLoader(Linear):
    """Loading ends with a change in place, once."""

    def __init__(self) -> None:
        super().__init__()
        self.converted = False

    def load_weights(self, weights: Any) -> None:
        super().load_weights(weights)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        if not self.converted:
            self.convert()

    def convert(self) -> None:
        self.converted = True
        self.weight.data.copy_(self.weight.data.t().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.float()


class FoldedByParameterLoader(FoldedByLoader):
    """The change is part of writing the parameter, and not repeated at the end."""

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)
            self.convert()
        self.post_load_weights()


class OfNoWeight(Linear):
    """It keeps memory to compute in, whose address others may hold."""

    def __init__(self) -> None:
        super().__init__()
        self._workspace: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(SIZE, SIZE)
        return torch.matmul(x, self.weight.float() + self._workspace)


class FromOutside(Linear):
    """The engine sets it when it starts; no method makes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.copy: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.float() if self.copy is None else self.copy)


class Tied(Linear):
    """Takes the weight of another layer, if it is told to."""

    def share(self, other: Linear) -> None:
        self.weight = other.weight


class OfInputs(Linear):
    """What it keeps depends on weight and input: no run without the input makes it again."""

    def __init__(self) -> None:
        super().__init__()
        self._scaled: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._scaled is None:
            self._scaled = self.weight.float() * x.max()
        return x @ self._scaled
