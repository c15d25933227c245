"""Follows values that a loader takes out of a checkpoint tensor with `item()` and fills into a parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from sglang_reshard.errors import Unsupported
from sglang_reshard.trace.geometry import Geometry, IndexMap, TooFragmented
from sglang_reshard.trace.lazy_tensor import (
    CheckpointTensor,
    NotPlainCopy,
    UninitializedRead,
    VersionedView,
    names_of,
    origins,
)
from sglang_reshard.trace.program import equals_one_cast

_USE_OWN = "Update this model with SGLang's own update_weights_from_tensor."


class TracedScalar(float):
    """The result of `item()` of a checkpoint tensor: a float that stands for the tensor's value, which is not known.

    A fill recognizes the float. Anything else that Python does with it raises Unsupported: the program would keep
    a meaningless result.
    """

    name: str

    def __new__(cls, number: float, name: str) -> TracedScalar:
        self = super().__new__(cls, number)
        self.name = name
        return self

    def _refuse(self, *_: Any) -> NoReturn:
        raise Unsupported(
            f"The loader reads the value of the checkpoint tensor {self.name} in Python; values are not available "
            f"while tracing. {_USE_OWN}"
        )

    def __repr__(self) -> str:
        return f"TracedScalar({self.name})"

    __str__ = __repr__


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OTHER = ("lt", "le", "eq", "ne", "gt", "ge", "hash", "bool", "int", "round", "trunc", "neg", "pos", "abs")
for _name in (*_OTHER, *_BINARY, *(f"r{name}" for name in _BINARY)):
    setattr(TracedScalar, f"__{_name}__", TracedScalar._refuse)


class Scalars:
    """The scalars that a loader has taken, recognized by their bits."""

    def __init__(self) -> None:
        self._origins: dict[float, VersionedView] = {}

    def take(self, view: VersionedView) -> TracedScalar:
        """Returns the scalar for a view of one element of a checkpoint tensor. Raises Unsupported for any other."""
        if (tensor := _one_element_tensor(view)) is None:
            raise Unsupported(
                f"The loader reads the value of a tensor derived from {names_of(view)} with item(); values are not "
                "available while tracing. item() is supported only for checkpoint tensors with one floating-point "
                f"element, to fill a parameter. {_USE_OWN}"
            )
        number = -(2.0**-900) * (len(self._origins) + 1)  # no weight is as small
        self._origins[number] = view
        return TracedScalar(number, tensor.spec.name)

    def origin(self, value: Any, size: tuple[int, ...] = ()) -> VersionedView | None:
        """Returns the view that a number was taken from, expanded to `size`; None for a plain number."""
        view = self._origins.get(value) if self._origins and isinstance(value, float) else None
        if view is None:
            return None
        return replace(view, geometry=Geometry(view.geometry.offset, size, (0,) * len(size)))

    def check_unused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises Unsupported if an operator that is no fill has a taken scalar among its arguments."""
        for value in (*args, *kwargs.values()):
            if (view := self.origin(value)) is not None:
                raise Unsupported(
                    f"The loader calls {func} with the value of {names_of(view)}. A value that was read with item() "
                    f"can only fill a parameter. {_USE_OWN}"
                )


def _one_element_tensor(view: VersionedView) -> CheckpointTensor | None:
    if view.geometry.numel != 1 or not view.dtype.is_floating_point:
        return None
    try:
        (origin,) = origins(view, IndexMap.flattening(view.geometry))
    except (NotPlainCopy, TooFragmented, UninitializedRead):
        return None
    content = origin.content
    if not isinstance(content, VersionedView) or not isinstance(content.storage.base, CheckpointTensor):
        return None
    tensor = content.storage.base
    return tensor if tensor.spec.numel == 1 and equals_one_cast((content.dtype, *origin.casts)) else None
