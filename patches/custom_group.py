"""sglang.srt.utils: joins the process groups that trainers broadcast over, as SGLang makes them."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def join(
    master_address: str, master_port: int, rank: int, world_size: int, group_name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Collective over the group. `timeout_s` of the rendezvous and of any operation."""
    from sglang.srt.utils.common import init_custom_process_group

    host = f"[{master_address.strip('[]')}]" if ":" in master_address else master_address  # an IPv6 address
    group: dist.ProcessGroup = init_custom_process_group(
        backend=backend,
        init_method=f"tcp://{host}:{master_port}",
        timeout=timedelta(seconds=timeout_s),
        world_size=world_size,
        rank=rank,
        group_name=group_name,
    )
    return group
