"""Parses the user's settings: `checkpoint_engine.engine_kwargs.reshard` in verl's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sglang_reshard.errors import Unsupported
from sglang_reshard.plan import check_transport
from sglang_reshard.protocol.messages import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT_S, Delta, Verify

BACKEND = "reshard"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of all syncs of a run.

    transport     "auto", "ipc", "p2p", "broadcast" or "nixl", see `sglang_reshard.plan.choice`
    bucket_bytes  size of a bucket; a rank holds at most two. verl's update_weights_bucket_megabytes, for staging whole
                  tensors, has no effect
    check_finite  check every shard for NaN and infinities first, and refuse them
    verify        "off", "sample" or "full": compare checksums of the received weights with the trainer's
    staged        keep new weights beside the old ones until all have arrived
    timeout       seconds that any one wait of a sync may last
    ignore        fnmatch patterns of names that the engine need not use
    draft         update the draft models of speculative decoding, too
    relay         standalone replicas read from each other what one of them has read already; with transport="nixl" only
    delta         "auto" sends what has changed where that is less, see `WeightSender`
    asynchronous  syncs return when the shards are copied; replicas have the weights later
    on_failure    "raise", or "exclude": standalone replicas that fail are left out until they have pulled the weights
    interface     address of trainer rank 0's host that rollout hosts can reach; Ray's address of that node if empty
    """

    transport: str = "auto"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    check_finite: bool = False
    verify: Verify = "off"
    staged: bool = False
    timeout: float = DEFAULT_TIMEOUT_S
    ignore: tuple[str, ...] = ()
    draft: bool = True
    relay: bool = False
    delta: Delta = "off"
    asynchronous: bool = False
    on_failure: Literal["raise", "exclude"] = "raise"
    interface: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Raises Unsupported for an unknown setting and for an invalid value."""
        try:
            settings = msgspec.convert(_plain(given), cls, strict=False)
        except msgspec.ValidationError as error:
            names = ", ".join(cls.__struct_fields__)
            raise Unsupported(
                f"checkpoint_engine.engine_kwargs.{BACKEND}: {error}. The settings are {names}"
            ) from error
        check_transport(settings.transport)
        if settings.bucket_bytes < 1 or settings.timeout <= 0:
            raise Unsupported(
                f"checkpoint_engine.engine_kwargs.{BACKEND}: bucket_bytes={settings.bucket_bytes} and "
                f"timeout={settings.timeout} must be positive"
            )
        if settings.relay and (settings.transport != "nixl" or settings.staged):
            raise Unsupported(
                f"checkpoint_engine.engine_kwargs.{BACKEND}: relay=True needs transport='nixl' and staged=False, not "
                f"{settings.transport!r} and staged={settings.staged}"
            )
        return settings

    @classmethod
    def of_rollout(cls, checkpoint_engine: Any) -> Settings:
        """Reads the settings of a rollout's `checkpoint_engine` configuration."""
        return cls.of((checkpoint_engine.engine_kwargs or {}).get(BACKEND) or {})


def _plain(given: Any) -> Any:
    """Converts Hydra's dictionaries and lists to Python's."""
    if isinstance(given, Mapping):
        return {str(key): _plain(value) for key, value in given.items()}
    return list(given) if not isinstance(given, (str, bytes)) and hasattr(given, "__iter__") else given
