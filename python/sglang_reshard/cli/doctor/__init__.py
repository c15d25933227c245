"""`sglang-reshard doctor`: checks this machine, and a server, for what updates need; a finding per line, with its cure.

finding    the result of one check
installed  package versions, and whether SGLang will load the plugin
host       shared memory, file descriptors, memory mappings, torchrun's variables
gpus       GPUs, peer access, CUDA IPC, NCCL, memory saver
nixl       NIXL, RDMA devices
server     a live server, by its URL
output     findings as a table or as JSON
"""

from __future__ import annotations

from sglang_reshard.cli.doctor.finding import Finding, Status
from sglang_reshard.cli.doctor.gpus import GPU_CHECKS
from sglang_reshard.cli.doctor.host import HOST_CHECKS
from sglang_reshard.cli.doctor.installed import INSTALLED_CHECKS
from sglang_reshard.cli.doctor.nixl import NIXL_CHECKS
from sglang_reshard.cli.doctor.server import check_server

_CHECKS = (*INSTALLED_CHECKS, *HOST_CHECKS, *GPU_CHECKS, *NIXL_CHECKS)

__all__ = ["Finding", "Status", "examine"]


def examine(url: str = "", api_key: str = "", admin_api_key: str = "") -> list[Finding]:
    """Returns all findings about this machine and, given a `url`, about that server. Leaves no process behind."""
    found = [finding for check in _CHECKS for finding in check()]
    return found + (check_server(url, api_key, admin_api_key) if url else [])
