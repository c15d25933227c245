"""What ranks announce of their GPUs, over a stand-in for CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_reshard.gpu import runtime as runtime_module
from sglang_reshard.gpu.announce import rank_device, trainer_device
from sglang_reshard.gpu.rank_info import RankGpuInfo
from sglang_reshard.gpu.runtime import CudaRuntime, use

GPU = torch.device("cuda", 1)


class TwoGpus(CudaRuntime):
    """Half tensors count as being on a GPU."""

    def __init__(self, used: bool = True) -> None:
        super().__init__()
        self.used = used

    def on_gpu(self, memory: torch.Tensor | torch.UntypedStorage) -> bool:
        return isinstance(memory, torch.Tensor) and memory.dtype == torch.float16

    def uses_gpu(self) -> bool:
        return self.used

    def current_device(self) -> torch.device:
        return GPU

    def uuid(self, device: torch.device) -> str:
        return f"GPU-{device.index}"

    def visible(self) -> tuple[str, ...]:
        return "GPU-0", "GPU-1"

    def allocator(self) -> str:
        return "native"

    def nccl_version(self) -> str:
        return "2.28.9"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = runtime_module.runtime()
    yield
    use(before)


def test_a_rank_announces_its_gpu_and_what_nccl_s_members_must_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # need not agree
    use(TwoGpus())
    expected = {"version": "2.28.9", "NCCL_CUMEM_ENABLE": "0"}
    assert rank_device(GPU) == RankGpuInfo("GPU-1", ("GPU-0", "GPU-1"), "native", expected)


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_rank_without_a_gpu_announces_none(device: torch.device | None) -> None:
    assert rank_device(device) == RankGpuInfo()


def test_a_trainer_rank_with_offloaded_shards_has_the_gpu_that_its_process_uses() -> None:
    use(TwoGpus())
    assert trainer_device([torch.ones(1)]) == GPU
    assert trainer_device([torch.ones(1), torch.ones(1, dtype=torch.float16)]) == torch.device("cpu"), "its shards'"
    use(TwoGpus(used=False))
    assert trainer_device([torch.ones(1)]) is None
