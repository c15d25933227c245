"""What VerlEngine refuses before it starts anything, and what it ends."""

import subprocess
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import sglang_reshard
from sglang_reshard import VerlEngine
from sglang_reshard.errors import Unsupported
from sglang_reshard.patches.embedded_engine import EmbeddedEngine


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dims", "options", "says"),
    [
        ("tp", {"backend": "native"}, "backend='native'"),
        ("tp", {"url": "http://gpu7:30000"}, "does not accept url: .* pass backend='server'"),
        ("tp", {"backend": "server", "tp_size": 2}, "does not accept model_path, tp_size"),
        (("dp", "tp"), {}, "has 2 dimensions"),
        ("tp", {"nnodes": 3}, "cannot be divided evenly among 3 nodes"),
        ("tp", {"nnodes": 2}, "interface="),
        ("tp", {"nnodes": 2, "interface": "::1"}, "interface="),
    ],
)
def test_what_cannot_be_started_is_refused_by_name(mesh, dims, options, says):
    with pytest.raises(Unsupported, match=says):
        VerlEngine(device_mesh_cpu=mesh[dims], model_path="none", **options)


def test_the_package_exports_what_it_says():
    assert all(getattr(sglang_reshard, name) is not None for name in sglang_reshard.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sglang_reshard.no_such_name


class EngineOf:
    """As much of SGLang's Engine as is asked when it is ended."""

    tokenizer_manager = None

    def __init__(self, *pids):
        self.get_all_child_pids = lambda: list(pids)

    def shutdown(self):
        raise AssertionError("it ends all children")


def test_a_shutdown_ends_the_engine_and_no_other_child_of_the_trainer():
    scheduler, loader = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    engine = VerlEngine.__new__(VerlEngine)
    engine._sender, engine._local = SimpleNamespace(close=lambda: None), EmbeddedEngine(EngineOf(scheduler.pid))
    try:
        engine.shutdown()
        assert not psutil.pid_exists(scheduler.pid)
        assert loader.poll() is None
    finally:
        loader.kill()
        loader.wait()
