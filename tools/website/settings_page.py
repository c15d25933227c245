"""docs/reference/settings.md: environment variables, and the options of senders, updates and more."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer

from sglang_reshard.cli.main import app
from sglang_reshard.extras.probe.probe import Probe
from sglang_reshard.extras.snapshots.of_sender import Snapshots
from sglang_reshard.extras.snapshots.writer import SnapshotOptions
from sglang_reshard.gpu.rank_info import NCCL_SETTINGS
from sglang_reshard.patches.launch import TORCHRUN_VARIABLES
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from tools.website import fields, markdown, sources


class Variable(NamedTuple):
    """One environment variable: its default and unit in Markdown, who reads it, and what it does."""

    name: str
    default: str
    unit: str
    reader: str
    effect: str


VARIABLES = (
    Variable("SGLANG_RESHARD_URL", "none", "URL", "trainer rank 0, commands", "the server, where no `url` is passed"),
    Variable(
        "SGLANG_RESHARD_API_KEY", "none", "", "trainer rank 0, commands", "the server's `--api-key`, if none is passed"
    ),
    Variable(
        "SGLANG_RESHARD_ADMIN_API_KEY",
        "none",
        "",
        "trainer rank 0, commands",
        "the server's `--admin-api-key`, if none is passed",
    ),
    Variable(
        "SGLANG_RESHARD_PEERS",
        "its own host",
        "hosts and networks, with commas",
        "a server",
        "other hosts that it may [take weights from](../usage/replicas.md#allowed-servers); `*` for all",
    ),
    Variable(
        "SGLANG_RESHARD_MAX_UPDATE_S",
        "3600",
        "seconds",
        "an engine",
        "[limit](../reliability.md#deadlines-and-failure-detection) of the whole time of an update, and of `timeout_s`",
    ),
    Variable(
        "SGLANG_RESHARD_SERVE_DUMMY",
        "off",
        "",
        "an engine",
        "`1`: serve requests [without weights](../reliability.md#no-weights-yet), too",
    ),
    Variable(
        "SGLANG_RESHARD_LOG",
        "text",
        "",
        "both sides",
        "`json`: write each record to stderr as a JSON object. Another value raises ValueError",
    ),
    Variable(
        "SGLANG_PLUGINS", "all", "names, with commas", "SGLang, `doctor`", "if it is set, it must contain `reshard`"
    ),
    Variable(
        "SGLANG_RUST_SERVER",
        "off",
        "",
        "a server",
        "on, from SGLang 0.5.17: updates are refused, because the Rust server cannot forward their requests",
    ),
    Variable(
        "GLOO_SOCKET_IFNAME",
        "the interface towards the session",
        "interface name",
        "both sides",
        "network interface of gloo's connections. If it is set, the package does not choose one",
    ),
    Variable(
        "NCCL_SOCKET_IFNAME",
        "NCCL's choice",
        "interface name",
        "both sides",
        "network interface of NCCL's connections. Errors of the rendezvous name it",
    ),
    Variable(
        "NCCL_CONF_FILE",
        "`~/.nccl.conf`, then `/etc/nccl.conf`",
        "path",
        "both sides",
        "file with NCCL's settings, which are read as NCCL reads them",
    ),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "entries",
        "both sides",
        "size of torch's flight recorder. The package keeps as many finished works of its NCCL groups alive",
    ),
    Variable("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", "entries", "both sides", "former name of `TORCH_FR_BUFFER_SIZE`"),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT",
        "torch's",
        "",
        "torch",
        "set to 1 while the package makes an NCCL communicator, and restored: it needs no watchdog",
    ),
    Variable(
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC",
        "torch's",
        "",
        "both sides",
        "set to 0 while the package aborts an NCCL communicator, and restored",
    ),
    Variable(
        "NIXL_LOG_LEVEL",
        "warnings",
        "",
        "both sides",
        "NIXL's log level. If it is not set, NIXL's Python logger shows warnings only",
    ),
    Variable("UCX_TLS", "UCX's choice", "", "UCX, `doctor`", 'transports of UCX, for `transport="nixl"`'),
    Variable("UCX_NET_DEVICES", "UCX's choice", "", "UCX, `doctor`", 'network devices of UCX, for `transport="nixl"`'),
    Variable(
        "MASTER_ADDR",
        "none",
        "host",
        "trainer rank 0",
        "with `VerlEngine(nnodes=2)` and more: the address at which other nodes find this one, if `interface` is not "
        "passed",
    ),
    Variable("RANK", "0", "", "verl's rollout workers", "rank 0 names the replica"),
    Variable(
        "PROMETHEUS_MULTIPROC_DIR",
        "SGLang's",
        "path",
        "a server",
        "folder that SGLang's processes share for metrics; SGLang sets it",
    ),
    Variable("CUDA_VISIBLE_DEVICES", "all", "GPUs", "CUDA, `doctor`", "GPUs of the process; `plan` hides all of them"),
    Variable("PYTORCH_ALLOC_CONF", "torch's", "", "torch, `doctor`", "`expandable_segments` excludes the memory saver"),
    Variable("PYTORCH_CUDA_ALLOC_CONF", "torch's", "", "torch, `doctor`", "former name of `PYTORCH_ALLOC_CONF`"),
    Variable("PYTHONPATH", "empty", "paths", "`cpu_host`", "gets the folder of stand-ins in front"),
    Variable(
        "VERL_USE_EXTERNAL_MODULES",
        "empty",
        "modules, with commas",
        "`cpu_host`",
        "gets the module of the CPU platform in front",
    ),
    Variable("SGLANG_USE_CPU_ENGINE", "0", "", "SGLang, `plan`", "1: an engine on CPU; `cpu_host` sets it"),
)
# Variable -> who sets it for processes that it starts. The package does not read these itself.
SET = {
    "OMP_NUM_THREADS": "`plan`, `cpu_host`: threads of a process",
    "HF_HUB_OFFLINE": "`plan`: no download",
    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "an embedded engine that spans several nodes",
    "SGLANG_CPU_OMP_THREADS_BIND": "`cpu_host`: a core for each engine rank",
    "SGLANG_NCCL_SO_PATH": "`cpu_host`: gloo in place of NCCL",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "`cpu_host`: the prefix tree in Python",
    "TORCHDYNAMO_DISABLE": "`cpu_host`: no compilation",
    "VERL_PLATFORM": "`cpu_host`: verl's platform",
    "VERL_ENGINE_DEVICE": "`cpu_host`: verl's registry of engines",
    "RAY_prestart_worker_first_driver": "`cpu_host`: no idle Ray workers",
}
# What looks like the name of a variable in files that read the environment.
_NOT_VARIABLES = {"CPU", "GPU", "NCCL", "GET", "POST", "DONE", "ERR", "READ", "UCX"}
_ENVIRONMENT = {"environ", "getenv", "envvar", "environment", "changed_environment"}
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]+(_[A-Za-z0-9]+)*")

_INTRODUCTION = """\
A setting is an argument in the code, unless it differs from host to host: then it is an environment variable. An
argument that is passed comes before the variable. Durations are in seconds, sizes in bytes.

- [Environment variables](#environment-variables)
- [SenderOptions](#senderoptions), [UpdateOptions](#updateoptions)
- [Snapshots](#snapshots), [Probe](#probe)
- [verl](#verl)

[Options](../usage/options.md) explains the options of senders and updates, and
[SGLang's options](../server-args.md) lists those of the engine."""

_COMMANDS = """\
Options of `sglang-reshard` that have a variable. An option that is given comes before it."""

_NCCL = """\
Ranks announce these, where they are set, so that the plan can refuse sides that would choose differently how to reach
each other, and would wait for ever:"""

_TORCHRUN = """\
An embedded engine's processes do not inherit what torchrun sets for its workers: an engine rank would take itself for a
trainer rank. These are hidden while they start:"""


def page() -> str:
    variables = [[f"`{v.name}`", v.default, v.unit, v.reader, v.effect] for v in VARIABLES]
    return markdown.page(
        "Settings",
        _INTRODUCTION,
        "## Environment variables",
        markdown.table(["variable", "default", "unit", "read by", "effect"], variables),
        "### Of commands",
        _COMMANDS,
        markdown.table(["variable", "default", "command", "option", "effect"], list(_of_commands())),
        "### NCCL's",
        _NCCL,
        _names(NCCL_SETTINGS),
        "### torchrun's",
        _TORCHRUN,
        _names(TORCHRUN_VARIABLES),
        "### Set for processes that are started",
        markdown.table(["variable", "set by"], [[f"`{name}`", by] for name, by in SET.items()]),
        "## SenderOptions",
        "Read by all senders: `WeightSender`, `MultiEngineSender`, `ModuleSender`, `ParameterStream` and `VerlEngine`.",
        _options(SenderOptions),
        "## UpdateOptions",
        "Read by `update`, `update_async` and `VerlEngine.update_weights_from_tensor`.",
        _options(UpdateOptions),
        "## Snapshots",
        "Read by `Snapshots`, `Snapshots.write` and `Snapshots.write_async`.",
        _options(SnapshotOptions, _of_snapshots(), without=("name",)),
        "## Probe",
        "Read by the trainer ranks. `sequences` and `logprobs` have no default.",
        _options(Probe),
        "## verl",
        "Read by trainer ranks and rollout workers from `checkpoint_engine.engine_kwargs.reshard` in verl's\n"
        "configuration; see [verl](../verl.md#settings).",
        _of_verl(),
    )


def variables_of_the_code() -> set[str]:
    """Returns the names of all environment variables in files of the package that use the environment, and NCCL's."""
    found = set(NCCL_SETTINGS)
    for tree in sources.trees(*_ENVIRONMENT):
        if not _uses_environment(tree):
            continue
        known = dict(constants(tree))
        named = {text for text in sources.strings(tree) if _VARIABLE.fullmatch(text)}
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "envvar" and isinstance(node.value, ast.JoinedStr):
                named.add("".join(_part(part, known) for part in node.value.values))
        found |= named - _NOT_VARIABLES
    return found


def variables_of_the_page() -> set[str]:
    """Returns the names of all variables that the page lists."""
    commands = {row[0].strip("`") for row in _of_commands()}
    return {v.name for v in VARIABLES} | commands | {*NCCL_SETTINGS, *TORCHRUN_VARIABLES, *SET}


def _uses_environment(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        names = (getattr(node, name, None) for name in ("attr", "id", "arg"))
        if any(name in _ENVIRONMENT for name in names):
            return True
    return False


def constants(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields the names of a module that stand for a string, and the string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = (
                zip(target.elts, value.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                else [(target, value)]
            )
            for name, text in pairs:
                if isinstance(name, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield name.id, text.value


def _part(part: ast.expr, known: Mapping[str, Any]) -> str:
    if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name):
        return str(known.get(part.value.id, ""))
    return str(part.value) if isinstance(part, ast.Constant) else ""


def _of_commands() -> Iterator[list[str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    for name, option in _command_options(typer.main.get_command(app), ""):
        default = "none" if option.default in (None, "") or callable(option.default) else f"`{_plain(option.default)}`"
        row = [f"`{option.envvar}`", default, f"`{name}`", f"`{option.opts[0]}`", markdown.cell(option.help or "")]
        key = str(option.envvar), option.opts[0]
        if key in rows:
            rows[key][2] += f", `{name}`"
        else:
            rows[key] = row
    yield from rows.values()


def _command_options(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for sub, of in getattr(command, "commands", {}).items():
        yield from _command_options(of, f"{name} {sub}".strip())
    for parameter in command.params:
        if parameter.envvar:
            yield name, parameter


def _names(names: tuple[str, ...]) -> str:
    return textwrap.fill(" ".join(f"`{name}`" for name in names), 120, break_on_hyphens=False)


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def _options(kind: Any, told: Mapping[str, str] | None = None, without: tuple[str, ...] = ()) -> str:
    told = fields.descriptions(inspect.getdoc(kind) or "") if told is None else told
    hints = get_type_hints(kind)
    rows = [
        [f"`{f.name}`", _kind(hints[f.name]), _default(f.default), _unit(f.name), markdown.cell(told[f.name])]
        for f in dataclasses.fields(kind)
        if f.name not in without
    ]
    return markdown.table(["option", "type", "default", "unit", ""], rows)


def _of_snapshots() -> dict[str, str]:
    of_update = fields.descriptions(inspect.getdoc(UpdateOptions) or "")
    own = fields.descriptions(inspect.getdoc(Snapshots) or "")
    return {name: of_update[name] if text.startswith("see ") else text for name, text in own.items()}


def _of_verl() -> str:
    settings = _verl_settings()
    theirs = settings._OF_SENDER | settings._OF_UPDATE
    told: dict[str, str] = {}
    for kind in (SenderOptions, UpdateOptions, settings.Settings):
        told |= fields.descriptions(inspect.getdoc(kind) or "")
    rows = [
        [f"`{name}`", _kind(hint), _default(default), _unit(name), markdown.cell(told[theirs.get(name, name)])]
        for name, hint, default in settings._table()
    ]
    return markdown.table(["setting", "type", "default", "unit", ""], rows)


def _verl_settings() -> types.ModuleType:
    """Returns the module without its package, which imports verl."""
    name = "reshard_verl_settings"
    if name not in sys.modules:
        path = sources.REPOSITORY / "verl_integration" / "settings.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(f'`"{value}"`' for value in get_args(hint))
    if hint is Any:
        return ""
    if get_origin(hint) in (types.UnionType, Union):
        return " or ".join(dict.fromkeys(_kind(part) for part in get_args(hint)))
    if hint is type(None):
        return "None"
    if getattr(get_origin(hint), "__name__", "") == "Sequence":
        return f"sequence of {_kind(get_args(hint)[0])}"
    if getattr(get_origin(hint), "__name__", "") in ("Callable", "Mapping", "dict"):
        return "function" if get_origin(hint).__name__ == "Callable" else "dict"
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
