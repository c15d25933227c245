"""cpu_host: the environment is complete, applied once however often it is asked for, and never on a GPU host."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from sglang_reshard.errors import Unsupported
from sglang_reshard.testing import cpu_host


@pytest.mark.parametrize("tp_size", [1, 2, 16])
def test_every_rank_is_bound_to_a_core_that_this_process_may_use(tp_size: int) -> None:
    binding = cpu_host.environment(tp_size)["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(binding) == tp_size
    assert set(map(int, binding)) <= os.sched_getaffinity(0)


def test_the_stand_in_comes_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/a", str(cpu_host.STAND_IN), "/b"]))
    assert cpu_host.environment(2)["PYTHONPATH"].split(os.pathsep) == [str(cpu_host.STAND_IN), "/a", "/b"]


def test_no_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        cpu_host.environment(0)


def test_a_host_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    before = dict(os.environ)
    with pytest.raises(cpu_host.GpuHost, match="hosts without a GPU, but this host has a GPU"):
        cpu_host.activate(2)
    assert os.environ == before


def test_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a host without a GPU")
    real = type(sys)("sgl_kernel")
    real.__file__ = "/site-packages/sgl_kernel/__init__.py"
    monkeypatch.setitem(sys.modules, "sgl_kernel", real)
    with pytest.raises(Unsupported, match=r"before the\s+first import of sglang"):
        cpu_host.activate(2)
