"""Reads NCCL's settings as NCCL does: from the environment, and from its configuration files where that has none."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from sglang_reshard.gpu.rank_info import NCCL_SETTINGS

_OF_THE_HOST = Path("/etc/nccl.conf")


def nccl_settings(environment: Mapping[str, str], of_the_host: Path = _OF_THE_HOST) -> dict[str, str]:
    """Returns those of `NCCL_SETTINGS` that are set: name -> value. See `initEnvFunc` in NCCL 2.28's param.cc."""
    files = [Path(environment["NCCL_CONF_FILE"]) if environment.get("NCCL_CONF_FILE") else _of_the_user(), of_the_host]
    found = dict[str, str]()
    for settings in (environment, *(_read(file) for file in files if file is not None)):
        for name in NCCL_SETTINGS:
            if name in settings:
                found.setdefault(name, settings[name])
    return found


def _of_the_user() -> Path | None:
    with contextlib.suppress(KeyError):
        return Path(pwd.getpwuid(os.getuid()).pw_dir, ".nccl.conf")
    return None


def _read(file: Path) -> dict[str, str]:
    """Returns what a configuration file sets. Of several lines for one name NCCL takes the first."""
    found = dict[str, str]()
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            name, equals, value = line.partition("=")
            if not line.startswith("#") and equals:
                found.setdefault(name, value)
    return found
