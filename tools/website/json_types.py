"""Describes msgspec's structs as JSON: each field with its type, its default and its description."""

from __future__ import annotations

import inspect
import json

import msgspec
from msgspec import inspect as types

from sglang_reshard.observability.probe_report import ProbeSummary
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    LoadSnapshotOutput,
    LoadSnapshotReq,
    PullWeightsReq,
    SharedWeights,
    ShareWeightsReq,
)
from sglang_reshard.protocol.weights_info import WeightsInfo
from tools.website import fields, markdown

# Of the endpoints; what these contain is listed, too.
MESSAGES: tuple[type[msgspec.Struct], ...] = (
    WeightsInfo,
    DistributedUpdateWeightsReq,
    DistributedUpdateWeightsOutput,
    PullWeightsReq,
    ShareWeightsReq,
    SharedWeights,
    LoadSnapshotReq,
    LoadSnapshotOutput,
    ProbeSummary,
)

_PLAIN: dict[type, str] = {
    types.StrType: "string",
    types.IntType: "integer",
    types.FloatType: "number",
    types.BoolType: "boolean",
    types.NoneType: "null",
    types.BytesType: "string (base64)",
}


def messages() -> str:
    """Returns a heading and a table for each struct of the endpoints' messages."""
    blocks = []
    for kind in dict.fromkeys(part for message in MESSAGES for part in structs(message)):
        opening = fields.opening(inspect.getdoc(kind) or "")
        blocks.append(f"### {kind.__name__}\n\n{opening}\n\n{table(kind)}")
    return "\n\n".join(blocks)


def table(kind: type[msgspec.Struct]) -> str:
    """Returns a struct's table. Raises KeyError for a field that nothing describes."""
    own = fields.descriptions(inspect.getdoc(kind) or "")
    inherited: dict[str, str] = {}
    if kind in (LoadSnapshotReq, PullWeightsReq, ShareWeightsReq):  # fields that they share with an update's request
        inherited = fields.descriptions(inspect.getdoc(DistributedUpdateWeightsReq) or "")
    told = {**own, **{n: text for n, text in inherited.items() if own.get(n, "as in ").startswith("as in ")}}
    rows = [
        [f"`{field.encode_name}`", described(field.type), _default(field), markdown.cell(told[field.name])]
        for field in _info(kind).fields
    ]
    return markdown.table(["field", "type", "default", "meaning"], rows)


def described(kind: types.Type) -> str:
    """Returns a type in words, with links to the tables of structs."""
    if (plain := _PLAIN.get(type(kind))) is not None:
        return plain + _bounds(kind)
    if isinstance(kind, types.StructType):
        return f"[{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
    if isinstance(kind, types.LiteralType):
        return " or ".join(f"`{json.dumps(value)}`" for value in kind.values)
    if isinstance(kind, types.UnionType):
        return " or ".join(described(part) for part in kind.types)
    if isinstance(kind, types.VarTupleType):
        return f"array of {described(kind.item_type)}"
    if isinstance(kind, types.DictType):
        return f"object: {described(kind.key_type)} to {described(kind.value_type)}"
    raise TypeError(f"no words for {kind}; add them here")


def structs(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Returns a struct, and all that its fields contain, each once."""
    found: dict[type[msgspec.Struct], None] = {}

    def visit(part: types.Type) -> None:
        if isinstance(part, types.StructType):
            if part.cls in found:
                return
            found[part.cls] = None
            for field in part.fields:
                visit(field.type)
        else:
            for inner in _inner(part):
                visit(inner)

    visit(_info(kind))
    return list(found)


def _info(kind: type[msgspec.Struct]) -> types.StructType:
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    return info


def _inner(kind: types.Type) -> list[types.Type]:
    held = [getattr(kind, name) for name in kind.__struct_fields__]
    parts = [part for value in held for part in (value if isinstance(value, tuple) else (value,))]
    return [part for part in parts if isinstance(part, types.Type)]


def _bounds(kind: types.Type) -> str:
    least, most = getattr(kind, "ge", None), getattr(kind, "le", None)
    return "" if least is None or most is None else f" from {least} to {most}"


def _default(field: types.Field) -> str:
    if field.required:
        return "required"
    made = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(made, msgspec.Struct):
        return "`{}`"
    return f"`{msgspec.json.encode(made).decode()}`"
