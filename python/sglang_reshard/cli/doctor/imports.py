"""Checks that all modules of a side's updates can be imported, in a separate process.

A dependency that is missing, or that has another version than is needed, fails here and not in the first update.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module, metadata
from typing import Literal, NamedTuple, get_args

from sglang_reshard.cli.doctor.finding import Finding, fail, ok
from sglang_reshard.cli.versions import installed_version

Side = Literal["trainer", "engine", "verl"]
SIDES: tuple[Side, ...] = get_args(Side)
_NAMES = {"trainer": "imports of a trainer", "engine": "imports of an engine", "verl": "imports of verl"}
_SECONDS = 300.0  # verl imports Ray and SGLang, on hosts where many do the same
_MODULES = {
    "trainer": (
        "sglang_reshard.api.multi_engine",
        "sglang_reshard.api.remote_engine",
        "sglang_reshard.api.weight_sender",
        "sglang_reshard.extras.asynchronous",
        "sglang_reshard.extras.modules.receiver",
        "sglang_reshard.extras.modules.sender",
        "sglang_reshard.extras.parameter_stream",
        "sglang_reshard.extras.realloc",
        "sglang_reshard.extras.snapshots.of_sender",
    ),
    "engine": (
        "sglang_reshard.engine.receiver",
        "sglang_reshard.patches.model_runner",
        "sglang_reshard.patches.io_struct",
    ),
}
# What a package that another name imports is called, and what brings those that an extra has.
_INSTALL = {
    "sglang": "pip install 'sglang-reshard[engine]'",
    "verl": "uv pip install --override overrides.txt 'sglang-reshard[verl]' sglang==0.5.12; the file is in "
    "docs/usage/installation.md",
    "opentelemetry": "pip install 'sglang-reshard[otel]'",
}


class FailedImport(NamedTuple):
    """A module that cannot be imported.

    error    type and message
    missing  top-level package that is not installed; empty if the import failed otherwise
    """

    module: str
    error: str
    missing: str


def side_named(name: str) -> Side | None:
    """Returns the side that `--side` names; None for `auto`."""
    return next((side for side in SIDES if side == name), None)


def installed_side() -> Side:
    """Returns the side that this environment is for, as far as its packages tell."""
    return "verl" if installed_version("verl") else "engine" if installed_version("sglang") else "trainer"


def check_imports(side: Side) -> list[Finding]:
    """Imports what an update on this side imports. One finding; it fails with the first package that is missing."""
    name = _NAMES[side]
    command = [sys.executable, "-m", "sglang_reshard.cli.doctor.imports", side]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return fail(name, f"they took more than {_SECONDS:.0f} s", "run it again when this host has less to do")
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[") or line == "[]"]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return fail(
            name,
            f"the process that imports them ended with {done.returncode}: {last}",
            "reinstall: pip install --force-reinstall sglang-reshard",
        )
    failures = [FailedImport(*failed) for failed in json.loads(lines[-1])]
    if not failures:
        return ok(name, f"all {len(modules_of(side))} modules can be imported")
    first = failures[0]
    says = f"{first.module} needs {first.missing}, which is not installed" if first.missing else first.error
    return fail(name, says, cure(first.missing, first.error, side))


def install(package: str, side: Side) -> str:
    """Returns how to install a package. verl brings the SGLang that fits: each alone has what the other excludes."""
    package = "verl" if side == "verl" and package == "sglang" else package
    return _INSTALL.get(package, f"pip install {package}")


def cure(missing: str, error: str, side: Side = "trainer") -> str:
    """Returns what to do about an import that failed."""
    if missing:
        return install(missing, side)
    if error.startswith(("ImportError: torch ", "Unsupported: ")):
        return "install the version that it names"
    return "install the versions that this package requires: pip install --upgrade sglang-reshard"


def modules_of(side: Side) -> tuple[str, ...]:
    """Returns the modules that an update on this side imports, the ones of trainers first."""
    if side == "trainer":
        return (*_declared(), *_MODULES["trainer"], *_routes())
    if side == "engine":
        return (*_declared(), "sglang", *_MODULES["engine"], *_routes())
    return (*modules_of("engine"), "verl", *_MODULES["trainer"], "sglang_reshard.verl")


def failures_of(side: Side) -> list[FailedImport]:
    found = []
    for module in modules_of(side):
        try:
            import_module(module)
        except Exception as error:  # noqa: PERF203 (each is a module's own)
            found.append(FailedImport(module, f"{type(error).__name__}: {error}", missing_package(error)))
    return found


def missing_package(error: Exception) -> str:
    """Returns the top-level package that is not installed; empty for other errors."""
    return (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""


def _declared() -> tuple[str, ...]:
    """Returns the packages that this one requires without an extra; some are imported only when a report is shown."""
    try:
        required = metadata.requires("sglang-reshard") or []
    except metadata.PackageNotFoundError:  # part of a forked SGLang, whose requirements SGLang declares
        return ()
    names = (re.match(r"[\w.-]+", line) for line in required if "extra ==" not in line)
    return tuple(name.group().replace("-", "_") for name in names if name)


def _routes() -> tuple[str, ...]:
    from sglang_reshard.route_table import AROUND, FROM_FILES, ROUTES

    return (*ROUTES.values(), *FROM_FILES.values(), *AROUND.values())


if __name__ == "__main__":
    print(json.dumps(failures_of(sys.argv[1])))  # type: ignore[arg-type]
