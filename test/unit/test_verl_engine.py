"""What VerlEngine refuses before it starts anything."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import sglang_reshard
from sglang_reshard import VerlEngine
from sglang_reshard.errors import Unsupported


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
        ("tp", {"nnodes": 3}, "cannot be spread evenly over 3 nodes"),
        ("tp", {"nnodes": 2}, "interface="),
    ],
)
def test_what_cannot_be_started_is_refused_by_name(mesh, dims, options, says):
    with pytest.raises(Unsupported, match=says):
        VerlEngine(device_mesh_cpu=mesh[dims], model_path="none", **options)


def test_the_package_exports_what_it_says():
    assert all(getattr(sglang_reshard, name) is not None for name in sglang_reshard.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sglang_reshard.no_such_name
