"""Values that a loader takes out of a checkpoint tensor with `item()`, and puts into a parameter with a fill."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.buffers import NotMovement, Reference, Source, Uninitialised, describe, movement
from sglang_reshard.trace.casts import one_cast_does
from sglang_reshard.trace.geometry import IndexMap, TooFragmented


class TracedScalar(float):
    """What `item()` of a checkpoint tensor gives: a float whose bits tell which tensor it came from.

    A fill recognises the bits. When the value is known (`exact`), Python sees that value; when it is
    not, anything that looks at it is refused, because the record would freeze a meaningless result.
    """

    exact: float | None
    name: str

    def __new__(cls, bits: float, exact: float | None, name: str) -> TracedScalar:
        self = super().__new__(cls, bits)
        self.exact, self.name = exact, name
        return self

    def known(self) -> float:
        if self.exact is None:
            raise Unsupported(
                f"The loader looks at the value of the checkpoint tensor {self.name}, which the trace does not "
                f"have. Give it: scalars={{'{self.name}': value}}."
            )
        return self.exact

    def __hash__(self) -> int:
        return hash(self.known())

    def __repr__(self) -> str:
        return f"TracedScalar({self.name}, {self.exact})"

    __str__ = __repr__


def _looks(operation: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: TracedScalar, *others: Any) -> Any:
        return operation(self.known(), *(o.known() if isinstance(o, TracedScalar) else o for o in others))

    return method


def _looks_reflected(operation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return _looks(lambda a, b: operation(b, a))


for _name in ("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs"):
    setattr(TracedScalar, f"__{_name}__", _looks(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(TracedScalar, f"__{_name}__", _looks(getattr(operator, _name)))
    setattr(TracedScalar, f"__r{_name}__", _looks_reflected(getattr(operator, _name)))
for _name, _operation in (("bool", bool), ("int", int), ("round", round), ("trunc", int)):
    setattr(TracedScalar, f"__{_name}__", _looks(_operation))


class Scalars:
    """The scalars that were given out, known again by the bits of the number."""

    def __init__(self, values: dict[str, float]) -> None:
        self._values = values
        self._origins: dict[float, Reference] = {}

    def give(self, reference: Reference) -> TracedScalar:
        """The scalar for a reference to one element of the checkpoint."""
        origin = _one_source_element(reference)
        if origin is None:
            raise Unsupported(
                "The loader goes by the value of a tensor that it derived from checkpoint tensors "
                f"({describe(reference)}); the trace has no bytes. Only one-element floating-point tensors of the "
                "checkpoint can be read with item()."
            )
        number = len(self._origins) + 1
        exact = self._values.get(origin.spec.name)
        if exact is None or exact == 0 or not math.isfinite(exact):
            # No real weight is as small as this.
            bits = -(2.0**-900) * number
        else:
            # The same number but for the last bits of the double, which no narrower dtype sees.
            (pattern,) = struct.unpack("<q", struct.pack("<d", float(exact)))
            (bits,) = struct.unpack("<d", struct.pack("<q", pattern & ~0xFFFFF | number))
        self._origins[bits] = reference
        return TracedScalar(bits, exact, origin.spec.name)

    def origin(self, value: Any) -> Reference | None:
        """What a number was taken from, as a reference without dimensions; None for a plain number."""
        reference = self._origins.get(value) if self._origins and isinstance(value, float) else None
        if reference is None:
            return None
        geometry = reference.geometry._replace(size=(), stride=())
        return Reference(reference.buffer, reference.version, geometry, reference.dtype)

    def refuse_arithmetic(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Only a fill can use a scalar: what else is computed with it would be frozen in the record."""
        if not self._origins:
            return
        for value in (*args, *kwargs.values()):
            reference = self.origin(value)
            if reference is not None:
                raise Unsupported(
                    f"The loader computes {func} with the value of {describe(reference)}; the trace can only carry "
                    "such a value to a fill."
                )


def _one_source_element(reference: Reference) -> Source | None:
    if reference.geometry.numel != 1 or not reference.dtype.is_floating_point:
        return None
    try:
        (piece,) = movement(reference, IndexMap.over(reference.geometry))
    except (NotMovement, TooFragmented, Uninitialised):
        return None
    origin = piece.origin
    if not isinstance(origin, Reference) or not isinstance(origin.buffer.base, Source):
        return None
    source = origin.buffer.base
    return source if source.spec.numel == 1 and one_cast_does((origin.dtype, *piece.casts)) else None
