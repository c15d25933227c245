"""Writes classes and functions as stubs: signatures with types and defaults, without bodies."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

# Of other parts of the package. The site leaves out what the stubs leave out.
_INTERNAL = {
    "WeightSender": "agree background cancel_update last_update participant ranks session set_engines timeout_s "
    "update_engines",
    "MultiEngineSender": "background participant wait_for_background",
    "SenderOptions": "of split",
    "UpdateOptions": "of renaming",
    "RemoteEngine": "record_probe share_weights",
    "SnapshotFollower": "folder_exists",
    "Probe": "engine_named token_ids",
    "ProbeReport": "exceeded",
    "UpdateReport": "failed",
    "DistributedUpdateWeightsReq": "labels",
    "ShardMap": "covered_elements min_local_shape shards_of to_local",
    "Session": "end end_engine engine_channel get join leave on_engine_end put store trainer_channel watch_peers",
    "UpdateHandle": "raise_unseen",
}


class _Text(str):
    """An annotation that a signature shows without quotation marks."""

    __repr__ = str.__str__


def stub(of: Any) -> str:
    lines = [_function(of.__name__, of)] if not inspect.isclass(of) else [f"class {of.__name__}:", *_members(of)]
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "stub.py", "-"]
    return subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True).stdout.strip()


def _members(of: type) -> Iterator[str]:
    fields = inspect.signature(of).parameters
    if dataclasses.is_dataclass(of) or issubclass(of, msgspec.Struct):
        types = {name: text for kind in reversed(of.__mro__) for name, text in inspect.get_annotations(kind).items()}
        for name, field in fields.items():
            yield f"    {name}: {types[name]}{'' if field.default is field.empty else f' = {_shown(field.default)}'}"
    else:
        yield f"    {_function('__init__', of.__init__)}"
    own = (kind for kind in reversed(of.__mro__) if kind.__module__.startswith("sglang_reshard"))
    hidden = [*fields, *_INTERNAL.get(of.__name__, "").split()]
    for name, member in {name: member for kind in own for name, member in vars(kind).items()}.items():
        if name.startswith("_") or name in hidden:
            continue
        if isinstance(member, property | functools.cached_property):
            get = member.fget if isinstance(member, property) else member.func
            yield f"    @property\n    {_function(name, get)}"
        elif isinstance(member, classmethod | staticmethod):
            yield f"    @{type(member).__name__}\n    {_function(name, member.__func__)}"
        elif inspect.isfunction(member):
            yield f"    {_function(name, member)}"


def _function(name: str, of: Any) -> str:
    signature = inspect.signature(of)
    parameters = [
        p.replace(annotation=_typed(p.annotation), default=p.empty if p.default is p.empty else _shown(p.default))
        for p in signature.parameters.values()
    ]
    signature = signature.replace(parameters=parameters, return_annotation=_typed(signature.return_annotation))
    return f"def {name}{signature}: ..."


def _typed(annotation: Any) -> Any:
    return _Text(annotation) if isinstance(annotation, str) else annotation


def _shown(default: Any) -> _Text:
    """A default as Python, or ... if it has no literal."""
    try:
        ast.parse(repr(default))
    except SyntaxError:
        return _Text("...")
    return _Text(repr(default))
