"""`sglang-reshard doctor`: is this machine, and a server, as an update needs them? One line each, with the cure.

finding   what a check finds
installed versions, and whether SGLang will load the plugin
host      shared memory, descriptors, mappings, torchrun's variables
gpus      GPUs, access between them, CUDA IPC, NCCL, memory saver
server    a live server, by its URL
shown     findings as a table or JSON
"""

from __future__ import annotations

from sglang_reshard.cli.doctor.finding import Finding, Status
from sglang_reshard.cli.doctor.gpus import GPU_CHECKS
from sglang_reshard.cli.doctor.host import HOST_CHECKS
from sglang_reshard.cli.doctor.installed import INSTALLED_CHECKS
from sglang_reshard.cli.doctor.server import check_server

__all__ = ["Finding", "Status", "examine"]


def examine(url: str = "", api_key: str = "", admin_api_key: str = "") -> list[Finding]:
    """All findings about this machine and, with a `url`, about the server there. Starts nothing that lasts."""
    found = [finding for check in (*INSTALLED_CHECKS, *HOST_CHECKS, *GPU_CHECKS) for finding in check()]
    return found + (check_server(url, api_key, admin_api_key) if url else [])
