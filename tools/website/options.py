"""Tables of docs/reference/settings.md: the options of commands, senders, updates and verl's settings."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from sglang_reshard.cli.main import app
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from tools.website import fields, markdown

_VERL_SETTINGS = Path(__file__).parents[2] / "verl_integration" / "settings.py"


def of_commands() -> str:
    """Options that have an environment variable; a row for each, with all commands that have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, option in _command_options(typer.main.get_command(app), ""):
        default = "none" if option.default in (None, "") or callable(option.default) else f"`{_plain(option.default)}`"
        row = [f"`{option.envvar}`", default, f"`{name}`", f"`{option.opts[0]}`", markdown.cell(option.help or "")]
        key = str(option.envvar), option.opts[0]
        if key in rows:
            rows[key][2] += f", `{name}`"
        else:
            rows[key] = row
    return markdown.table(["variable", "default", "command", "option", "effect"], list(rows.values()))


def _command_options(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for sub, of in getattr(command, "commands", {}).items():
        yield from _command_options(of, f"{name} {sub}".strip())
    for parameter in command.params:
        if parameter.envvar:
            yield name, parameter


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def of_class(kind: Any, told: Mapping[str, str] | None = None, without: tuple[str, ...] = ()) -> str:
    """The fields of a dataclass. `told` describes them; by default its docstring does."""
    told = _told(kind) if told is None else told
    hints = get_type_hints(kind)
    found = [f for f in dataclasses.fields(kind) if f.name not in without]
    return _table("option", [(f.name, hints[f.name], f.default, told[f.name]) for f in found])


def of_snapshots() -> dict[str, str]:
    """Returns option -> description; some docstrings refer to the options of updates."""
    of_update = _told(UpdateOptions)
    return {name: of_update[name] if text.startswith("see ") else text for name, text in _told(Snapshots).items()}


def of_verl() -> str:
    settings = _verl_settings()
    theirs = settings._OF_SENDER | settings._OF_UPDATE
    told = _told(SenderOptions) | _told(UpdateOptions) | _told(settings.Settings)
    rows = [(name, hint, default, told[theirs.get(name, name)]) for name, hint, default in settings._table()]
    return _table("setting", rows)


def _told(kind: Any) -> dict[str, str]:
    return fields.descriptions(inspect.getdoc(kind) or "")


def _verl_settings() -> types.ModuleType:
    """Returns the module without its package, which imports verl."""
    name = "reshard_verl_settings"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _VERL_SETTINGS)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _table(first: str, options: list[tuple[str, Any, Any, str]]) -> str:
    """options: name, type, default and description of each."""
    rows = [
        [f"`{n}`", _kind(hint), _default(default), _unit(n), markdown.cell(text)] for n, hint, default, text in options
    ]
    return markdown.table([first, "type", "default", "unit", "meaning"], rows)


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(f'`"{value}"`' for value in get_args(hint))
    if hint is Any:
        return ""
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(dict.fromkeys(_kind(part) for part in get_args(hint)))
    if hint is type(None):
        return "None"
    generic = getattr(get_origin(hint), "__name__", "")
    if generic == "Sequence":
        return f"sequence of {_kind(get_args(hint)[0])}"
    if generic in ("Callable", "Mapping", "dict"):
        return "function" if generic == "Callable" else "dict"
    return f"`{getattr(hint, '__name__', hint)}`"


def _default(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def _unit(name: str) -> str:
    if name == "timeout" or name.endswith("_s"):
        return "seconds"
    if name.endswith("_bytes"):
        return "bytes"
    return "nats" if name.endswith("_threshold") else ""
