"""`sglang-reshard doctor`: checks that this machine, and a server, can run updates. Each finding has its fix.

finding    the result of one check, and how findings are shown
imports    what an update imports on a trainer's, an engine's or verl's side
supported  versions of the packages that a side needs
installed  versions of Python, this package and transformers, and whether SGLang will load the plugin
host       shared memory, file descriptors, memory mappings, torchrun's variables, NIXL, RDMA devices
gpus       GPUs, peer access, CUDA IPC, NCCL, memory saver
server     a live server, by its URL

The checks are imported when they run: a package that is missing is a finding, and the other checks go on.
"""

from __future__ import annotations

from importlib import import_module

from sglang_reshard.cli.doctor.finding import Finding, Status, fail
from sglang_reshard.cli.doctor.imports import Side, check_imports, cure, installed_side, missing_package

__all__ = ["Finding", "Side", "Status", "examine"]


def examine(url: str = "", api_key: str = "", admin_api_key: str = "", side: Side | None = None) -> list[Finding]:
    """Returns all findings about this machine and, given a `url`, about that server. Leaves no process behind.

    side  the side that this environment runs; None: as its packages show
    """
    side = side or installed_side()
    found = check_imports(side) + _findings("supported", side)
    for module in ("installed", "host", "gpus"):
        found += _findings(module)
    if url:
        found += _findings("server", url, api_key, admin_api_key)
    return found


def _findings(module: str, *arguments: str) -> list[Finding]:
    """Returns the findings of all functions `check_*` of a module of this package, or that a package is missing."""
    try:
        functions = vars(import_module(f"{__name__}.{module}")).copy()
        own = [f for name, f in functions.items() if name.startswith("check_") and f.__module__.endswith(module)]
        return [finding for check in own for finding in check(*arguments)]
    except ImportError as error:
        says = f"{type(error).__name__}: {error}"
        return fail(f"checks of {module}", says, cure(missing_package(error), says))
