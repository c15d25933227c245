"""A server as `sglang_reshard.selftest.digests.read_live_digests` takes an engine."""

from __future__ import annotations

import base64
import pickle

import httpx
import torch


class HttpEngine:
    """As much of `sglang.Engine` as reading digests takes, of a server."""

    def __init__(self, address: str, tp_size: int) -> None:
        self.address, self.server_args = address, self
        self.tp_size, self.dp_size, self.pp_size, self.enable_dp_attention = tp_size, 1, 1, False

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, torch.Tensor]], load_format: str, flush_cache: bool
    ) -> tuple[bool, str]:
        packed = pickle.dumps(named_tensors)  # by value, as a server on another host shares no memory
        body = {
            "serialized_named_tensors": [base64.b64encode(packed).decode()] * self.tp_size,
            "load_format": load_format,
            "flush_cache": flush_cache,
        }
        url = f"http://{self.address}/update_weights_from_tensor"
        response = httpx.post(url, json=body, timeout=60, trust_env=False)
        if response.status_code != httpx.codes.OK:
            return False, f"it answered {response.status_code} {response.text[:300]}; see the server's log"
        return response.json()["success"], response.json()["message"]
