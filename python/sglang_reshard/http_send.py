"""How trainer rank 0 reaches a server by its URL, for those who open their sessions themselves."""

from __future__ import annotations

from sglang_reshard.lead import Send
from sglang_reshard.messages import DEFAULT_TIMEOUT_S
from sglang_reshard.remote import WAITS, RemoteEngine

__all__ = ["WAITS", "http_send"]


def http_send(url: str, *, api_key: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> Send:
    """The `send` of a `WeightSender.over` or a `Fleet`, for a server at `url`; see `RemoteEngine`, which says no more.

    api_key    the server's admin key, or its API key if it has no admin key
    timeout_s  the update's
    """
    return RemoteEngine(url, api_key=api_key, timeout_s=timeout_s).update_weights_distributed
