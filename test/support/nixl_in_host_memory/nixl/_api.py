"""NIXL's API, to which all memory is host memory."""

from __future__ import annotations

from typing import Any

import nixl_cu13._api as nixl_api
from nixl_cu13._api import nixl_agent_config, nixl_thread_sync_t

__all__ = ["nixl_agent", "nixl_agent_config", "nixl_thread_sync_t"]


class nixl_agent(nixl_api.nixl_agent):  # type: ignore[misc, name-defined]
    def register_memory(self, memory: Any, mem_type: str | None = None, *rest: Any, **options: Any) -> Any:
        return super().register_memory(memory, mem_type and "DRAM", *rest, **options)

    def get_xfer_descs(self, memory: Any, mem_type: str | None = None, *rest: Any, **options: Any) -> Any:
        return super().get_xfer_descs(memory, mem_type and "DRAM", *rest, **options)

    def prep_xfer_dlist(
        self, agent_name: str, memory: Any, mem_type: str | None = None, *rest: Any, **options: Any
    ) -> Any:
        return super().prep_xfer_dlist(agent_name, memory, mem_type and "DRAM", *rest, **options)
