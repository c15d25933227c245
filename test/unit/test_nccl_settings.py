"""Settings of NCCL are read where NCCL reads them, and an NVLink domain is what NVML says."""

import pytest

from sglang_reshard.gpu.nccl_settings import nccl_settings
from sglang_reshard.gpu.nvml import domain_name, nvlink_domain


def test_files_set_what_the_environment_does_not(tmp_path):
    of_the_user, of_the_host = tmp_path / "own.conf", tmp_path / "nccl.conf"
    of_the_user.write_text("NCCL_P2P_DISABLE=1\nNCCL_P2P_DISABLE=0\n#NCCL_SHM_DISABLE=1\nNCCL_DEBUG=INFO\nnonsense\n")
    of_the_host.write_text("NCCL_CUMEM_ENABLE=1\nNCCL_P2P_DISABLE=7\nNCCL_MNNVL_ENABLE=0\n")
    environment = {"NCCL_CONF_FILE": str(of_the_user), "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_settings(environment, of_the_host) == {
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
    }


def test_files_that_are_not_there_set_nothing(tmp_path):
    nowhere = tmp_path / "nowhere"
    assert nccl_settings({"NCCL_CONF_FILE": str(nowhere)}, nowhere) == {}


@pytest.mark.parametrize(
    ("cluster", "state", "expected"),
    [(bytes(range(16)), 3, "000102030405060708090a0b0c0d0e0f/7"), (bytes(16), 3, ""), (bytes(range(16)), 2, "")],
)
def test_a_gpu_is_in_a_domain_once_its_fabric_has_a_cluster_and_is_ready(cluster, state, expected):
    assert domain_name(cluster, 7, state) == expected


def test_a_host_without_the_library_has_no_domain():
    assert nvlink_domain("GPU-00000000-0000-0000-0000-000000000000") == ""
