"""cpu_host for verl keeps what verl was to import, never reaches a GPU host, and names verl in one module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_reshard.testing import cpu_host
from sglang_reshard.testing.cpu_host import verl_settings


def test_modules_that_verl_was_to_import_already_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", f"mine,{verl_settings.PLATFORM_MODULE}")
    assert verl_settings.environment(1)["VERL_USE_EXTERNAL_MODULES"] == f"{verl_settings.PLATFORM_MODULE},mine"


def test_a_host_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    with pytest.raises(cpu_host.GpuHost, match=r"verl_settings.* this host has a GPU"):
        verl_settings.environment(2)


def test_no_other_module_of_the_core_names_verl() -> None:
    package = Path(cpu_host.__file__).parent.parent
    importing = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if any(line.strip().startswith(("import verl", "from verl")) for line in file.read_text().splitlines())
    }
    assert importing == {"cpu_host/verl_platform.py"}
