"""Checks the versions of the packages that a side needs, against the requirements and extras of this package."""

from __future__ import annotations

from sglang_reshard.cli.doctor.finding import Finding, fail, ok, warning
from sglang_reshard.cli.doctor.imports import Side, install
from sglang_reshard.cli.doctor.installed import wanted
from sglang_reshard.cli.versions import installed_version

_NEEDED: dict[Side, tuple[str, ...]] = {
    "trainer": ("torch",),
    "engine": ("torch", "sglang"),
    "verl": ("torch", "sglang", "verl"),
}


def check_supported(side: Side) -> list[Finding]:
    found: list[Finding] = []
    for name in _NEEDED["verl"]:
        told, asked = installed_version(name), wanted("sglang-reshard", name)
        advice = install(name, side) if side == "verl" and name != "torch" else f"pip install '{asked or name}'"
        if told is None and name in _NEEDED[side]:
            found += fail(name, "not installed", advice)
        elif told is None:
            found += ok(name, f"not installed; where it is needed: {asked}")
        elif asked is not None and not asked.specifier.contains(told, prereleases=True):
            found += warning(name, f"{told}; sglang-reshard is tested with {asked.specifier}", advice)
        else:
            found += ok(name, told)
    return found
