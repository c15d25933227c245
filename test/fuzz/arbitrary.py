"""Arbitrary values of a type, changed values, damaged bytes: what a stranger, or a broken sender, might say."""

from __future__ import annotations

import dataclasses
import functools
import re
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # what msgpack carries
_NUMBERS = (
    0, 1, -1, 2, 3, 7, 15, 16, 255, 4096, 1 << 15, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 62,
    (1 << 63) - 1, 1 << 63, _MOST, _LEAST,
)  # fmt: skip
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e9, 1e300, float("inf"), float("-inf"), float("nan"))
_WORDS = (
    "",
    "a",
    "float32",
    "uint8",
    "gloo",
    "../..",
    "/",
    "\0",
    "\udcff".encode("utf-8", "replace").decode(),
    "é" * 9,
)


def value_of(kind: Any, random: Random) -> Any:
    """Some value of a type that messages are made of."""
    return _value(_type_info(kind), random, 0)


_type_info = functools.cache(inspect.type_info)


def _value(kind: Any, random: Random, depth: int) -> Any:
    match kind:
        case inspect.BoolType():
            return random.random() < 0.5
        case inspect.IntType():
            number = random.choice(_NUMBERS) if random.random() < 0.5 else random.randrange(-2, 9)
            least = _LEAST if kind.ge is None else kind.ge
            most = _MOST if kind.le is None and kind.lt is None else kind.le if kind.lt is None else kind.lt - 1
            step = kind.multiple_of or 1
            return max(least, min(most, number)) // step * step
        case inspect.FloatType():
            least = float("-inf") if kind.ge is None else kind.ge
            most = float("inf") if kind.le is None else kind.le
            bounded = kind.ge is not None or kind.le is not None
            return random.choice([n for n in _FLOATS if least <= n <= most or (n != n and not bounded)])
        case inspect.StrType():
            words = [word for word in (*_WORDS, "0" * 16, "0" * 64) if len(word) >= (kind.min_length or 0)]
            return random.choice([word for word in words if re.search(kind.pattern or "", word)])
        case inspect.BytesType():
            return random.randbytes(kind.min_length or random.randrange(9))
        case inspect.NoneType():
            return None
        case inspect.AnyType():
            return random.choice((None, 1, "a", [1, 2]))
        case inspect.LiteralType():
            return random.choice(kind.values)
        case inspect.UnionType():
            return _value(random.choice(kind.types), random, depth)
        case inspect.VarTupleType() | inspect.ListType():
            few = [_value(kind.item_type, random, depth + 1) for _ in range(random.randrange(4 if depth < 6 else 1))]
            return few if isinstance(kind, inspect.ListType) else tuple(few)
        case inspect.TupleType():
            return tuple(_value(item, random, depth + 1) for item in kind.item_types)
        case inspect.DictType():
            keys = [_value(kind.key_type, random, depth + 1) for _ in range(random.randrange(3))]
            return {key: _value(kind.value_type, random, depth + 1) for key in keys}
        case inspect.StructType() | inspect.DataclassType() | inspect.NamedTupleType():
            return _made(kind, random, depth)
    raise NotImplementedError(f"no values of {kind} are made here")


def _made(kind: Any, random: Random, depth: int) -> Any:
    fields = {field.name: _value(field.type, random, depth + 1) for field in kind.fields}
    try:
        return kind.cls(**fields)
    except ValueError:  # some types will not have some values
        return _made(kind, random, depth)


def changed(value: Any, random: Random) -> Any:
    """The same value, but for one thing somewhere in it, which may be of another type then."""
    match value:
        case msgspec.Struct():
            names = value.__struct_fields__
            return _with(value, random.choice(names), random, msgspec.structs.replace) if names else value
        case bool():
            return not value
        case int():
            number = random.choice((value + 1, value - 1, -value, value * 2, random.choice(_NUMBERS)))
            return max(_LEAST, min(_MOST, number))
        case float():
            return random.choice((*_FLOATS, -value))
        case str():
            return random.choice((value + "x", value[1:], *_WORDS))
        case bytes():
            return damaged(value, random)
        case tuple() | list() if not hasattr(value, "_fields"):
            return _changed_sequence(value, random)
        case dict():
            return _changed_dict(value, random)
        case None:
            return random.choice((0, "", ()))
    if dataclasses.is_dataclass(value):
        return _with(value, random.choice(dataclasses.fields(value)).name, random, dataclasses.replace)
    if hasattr(value, "_fields"):
        return _with(value, random.choice(value._fields), random, lambda v, **new: v._replace(**new))
    raise NotImplementedError(f"no {type(value).__name__} is changed here")


def damaged(data: bytes, random: Random) -> bytes:
    """Bytes with something flipped, left out, put in, repeated, or cut off."""
    first = random.randrange(len(data) + 1)
    last = min(len(data), first + random.choice((0, 1, 1, 2, 8)))
    put = random.choice((b"", b"\0", b"\xff", b"\xdd\xff\xff\xff\xff", data[first:last] * 2, random.randbytes(2)))
    if random.random() < 0.2:
        return data[:first]
    if random.random() < 0.3 and first < len(data):
        put, last = bytes([data[first] ^ (1 << random.randrange(8))]), first + 1
    return data[:first] + put + data[last:]


def _with(value: Any, name: str, random: Random, replace: Any) -> Any:
    try:
        return replace(value, **{name: changed(getattr(value, name), random)})
    except (ValueError, TypeError):  # some types will not have some values; on the wire these are refused
        return value


def _changed_sequence(value: Any, random: Random) -> Any:
    items = list(value)
    what = random.randrange(8)
    if not items or what == 0:
        items.insert(random.randrange(len(items) + 1), random.choice(items) if items else 0)
    elif what == 1:
        del items[random.randrange(len(items))]
    elif what == 2:
        i, j = random.randrange(len(items)), random.randrange(len(items))
        items[i], items[j] = items[j], items[i]
    else:
        i = random.randrange(len(items))
        items[i] = changed(items[i], random)
    return type(value)(items)


def _changed_dict(value: dict[Any, Any], random: Random) -> dict[Any, Any]:
    items = dict(value)
    if not items:
        return {0: 0}
    key = random.choice(list(items))
    found = items.pop(key)
    if random.random() < 0.7:
        items[key if random.random() < 0.5 else changed(key, random)] = changed(found, random)
    return items
