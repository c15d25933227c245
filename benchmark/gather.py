"""Gathers a DTensor, also where several ranks share a GPU, and gloo has to."""

from __future__ import annotations

import functools

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def whole(tensor: DTensor) -> torch.Tensor:
    """Returns all elements, on every rank of the tensor's mesh; in host memory, if gloo gathers them.

    torch's gloo reads the addresses of CUDA tensors as host memory when a DTensor is gathered: the process ends with
    SIGSEGV (pytorch/pytorch#152645).
    """
    with torch.no_grad():
        if tensor.device.type == "cuda" and not _gathers_on_gpu(tensor.device_mesh):
            local, mesh = tensor.to_local().cpu(), _on_hosts(tensor.device_mesh)
            tensor = DTensor.from_local(
                local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        found: torch.Tensor = tensor.full_tensor()
    return found


def _gathers_on_gpu(mesh: DeviceMesh) -> bool:
    return str(mesh.get_group()._get_backend(torch.device("cuda")).name()) == "nccl"


@functools.cache
def _on_hosts(mesh: DeviceMesh) -> DeviceMesh:
    return DeviceMesh.from_group(mesh.get_group(), "cpu")
