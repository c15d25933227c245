"""`sglang-reshard doctor`: checks that this machine, and a server, can run updates. Each finding has its fix.

finding    the result of one check
imports    what an update imports on a trainer's, an engine's or verl's side
installed  package versions, and whether SGLang will load the plugin
host       shared memory, file descriptors, memory mappings, torchrun's variables
gpus       GPUs, peer access, CUDA IPC, NCCL, memory saver
nixl       NIXL, RDMA devices
server     a live server, by its URL
output     findings as a table, as text or as JSON

The checks are imported when they run: a package that is missing is a finding, and the other checks go on.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from sglang_reshard.cli.doctor.finding import Finding, Status, fail
from sglang_reshard.cli.doctor.imports import Side, check_imports, cure, installed_side, missing_package

__all__ = ["Finding", "Side", "Status", "examine"]


def examine(url: str = "", api_key: str = "", admin_api_key: str = "", side: Side | None = None) -> list[Finding]:
    """Returns all findings about this machine and, given a `url`, about that server. Leaves no process behind.

    side  the side that this environment runs; None: as its packages show
    """
    found = check_imports(side or installed_side())
    for module in ("installed", "host", "gpus", "nixl"):
        found += _findings(module, "CHECKS", lambda checks: [finding for check in checks for finding in check()])
    if url:
        found += _findings("server", "check_server", lambda check: check(url, api_key, admin_api_key))
    return found


def _findings(module: str, name: str, run: Callable[..., list[Finding]]) -> list[Finding]:
    """Returns what `run` finds with `name` of a module of this package, or that a package is missing for that."""
    try:
        return run(getattr(import_module(f"{__name__}.{module}"), name))
    except ImportError as error:
        says = f"{type(error).__name__}: {error}"
        return fail(f"checks of {module}", says, cure(missing_package(error), says))
