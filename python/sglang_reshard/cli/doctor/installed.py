"""Checks versions of Python, this package and transformers, and whether SGLang will load the plugin."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement

from sglang_reshard.cli.doctor.finding import Finding, fail, ok, warning
from sglang_reshard.cli.versions import installed_version
from sglang_reshard.version import __version__

_PACKAGE = "sglang-reshard"
_GROUP, _NAME = "sglang.srt.plugins", "reshard"
_TESTED_TRANSFORMERS = "5.9.0"
_INSTALL = "pip install 'sglang-reshard[engine]'"


def check_python() -> list[Finding]:
    running, wanted = platform.python_version(), ""
    with suppress(metadata.PackageNotFoundError):
        wanted = str(metadata.metadata(_PACKAGE).json.get("requires_python") or "")
    if wanted and not Requirement(f"python{wanted}").specifier.contains(running):
        return fail("python", f"{running}, and sglang-reshard needs {wanted}", f"use a Python {wanted}")
    return ok("python", running)


def check_this_package() -> list[Finding]:
    """The imported and the installed version can differ: a checkout on PYTHONPATH, another one in site-packages."""
    told = installed_version(_PACKAGE) or provided_by_sglang()
    if told is None:
        return fail(
            _PACKAGE,
            f"{__version__} runs from {_home()}, and is not installed: SGLang finds plugins by their installation",
            _INSTALL,
        )
    if told != __version__:
        return fail(
            _PACKAGE,
            f"{__version__} runs from {_home()}, and {told} is installed: trainer and engine would differ",
            "remove one of them: pip uninstall sglang-reshard, or clear PYTHONPATH",
        )
    return ok(_PACKAGE, told)


def check_transformers() -> list[Finding]:
    """SGLang pins one that verl excludes."""
    told = installed_version("transformers")
    if told is None or installed_version("sglang") is None:
        return ok("transformers", told or "not installed; needed where an engine runs")
    asked = wanted("sglang", "transformers")
    if asked is None or asked.specifier.contains(told, prereleases=True):
        return ok("transformers", told)
    says = f"{told}, and SGLang asks for {asked.specifier}"
    if told == _TESTED_TRANSFORMERS:
        return ok("transformers", f"{says}; sglang-reshard is tested with this one")
    return warning("transformers", says, f"pip install '{asked}', or {_TESTED_TRANSFORMERS}, which suits verl too")


def check_plugin() -> list[Finding]:
    """SGLang loads plugins by entry point, and only logs when that fails."""
    if installed_version("sglang") is None:
        return ok("plugin", "no engine can run here; nothing to load")
    found = [entry for entry in metadata.entry_points(group=_GROUP) if entry.name == _NAME]
    if not found:
        return fail("plugin", f"SGLang will not find it: no entry point {_NAME!r} in {_GROUP}", _INSTALL)
    if len(found) > 1:
        packages = sorted({entry.dist.name for entry in found if entry.dist is not None})
        return warning(
            "plugin",
            f"{len(found)} entry points {_NAME!r}, of {', '.join(packages)}",
            "keep one: pip uninstall sglang-reshard where SGLang itself brings it",
        )
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and _NAME not in {name.strip() for name in allowed.split(",")}:
        return fail(
            "plugin", f"SGLANG_PLUGINS={allowed} leaves it out", f"export SGLANG_PLUGINS={allowed},{_NAME}, or unset it"
        )
    try:
        found[0].load()
    except Exception as error:
        return fail("plugin", f"it cannot be imported: {type(error).__name__}: {error}", _INSTALL)
    return ok("plugin", f"SGLang will load {found[0].value}")


def provided_by_sglang() -> str | None:
    """Returns the version of this package that a forked SGLang wheel provides, or None."""
    try:
        provided = metadata.metadata("sglang").get_all("Provides-Dist") or []
    except metadata.PackageNotFoundError:
        return None
    versions = [text.partition("(")[2].strip(")") for text in provided if text.split(" ")[0] == _PACKAGE]
    return versions[0] if versions else None


def wanted(package: str, name: str) -> Requirement | None:
    """Returns the requirement of `package` on `name`, from any of its extras, without the marker."""
    try:
        listed = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in map(Requirement, listed):
        if requirement.name == name:
            requirement.marker = None
            return requirement
    return None


def _home() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
