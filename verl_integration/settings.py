"""Parses the user's settings: `checkpoint_engine.engine_kwargs.reshard` in verl's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

import msgspec

from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions

BACKEND = "reshard"
# What may be set of a sender's and of an update's options: verl's name -> theirs.
_OF_SENDER = {"transport": "transport", "bucket_bytes": "bucket_bytes", "timeout": "timeout_s", "delta": "delta"}
_OF_UPDATE = {name: name for name in ("verify", "staged", "ignore", "frozen", "draft")}
_PLACE = f"checkpoint_engine.engine_kwargs.{BACKEND}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of all syncs of a run. In verl's configuration they are all in one table.

    sender, update  see `SenderOptions` and `UpdateOptions`. verl's update_weights_bucket_megabytes, for staging whole
                    tensors, has no effect
    check_finite    check every shard for NaN and infinities first, and refuse them
    relay           standalone replicas read from each other what one of them has read already; with transport="nixl"
                    only
    asynchronous    syncs return when the shards are copied; replicas have the weights later
    on_failure      "raise", or "exclude": standalone replicas that fail are left out until they have pulled the weights
    interface       address of trainer rank 0's host that rollout hosts can reach; Ray's address of that node if empty
    """

    sender: SenderOptions = field(default_factory=SenderOptions)
    update: UpdateOptions = field(default_factory=UpdateOptions)
    check_finite: bool = False
    relay: bool = False
    asynchronous: bool = False
    on_failure: Literal["raise", "exclude"] = "raise"
    interface: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Raises Unsupported for an unknown setting and for an invalid value."""
        try:
            kind = msgspec.defstruct("Settings", _table(), forbid_unknown_fields=True)
            chosen = msgspec.structs.asdict(msgspec.convert(_plain(given), kind, strict=False))
        except msgspec.ValidationError as error:
            names = ", ".join(name for name, *_ in _table())
            raise Unsupported(f"{_PLACE}: {error}. The settings are {names}") from error
        try:
            sender = SenderOptions(**{theirs: chosen.pop(name) for name, theirs in _OF_SENDER.items()})
            update = UpdateOptions(**{theirs: chosen.pop(name) for name, theirs in _OF_UPDATE.items()})
        except ReshardError as error:
            raise Unsupported(f"{_PLACE}: {error}") from error
        settings = cls(sender, update, **chosen)
        if settings.relay and (sender.transport != "nixl" or update.staged):
            raise Unsupported(
                f"{_PLACE}: relay=True needs transport='nixl' and staged=False, not {sender.transport!r} and "
                f"staged={update.staged}"
            )
        return settings

    @classmethod
    def of_rollout(cls, checkpoint_engine: Any) -> Settings:
        """Reads the settings of a rollout's `checkpoint_engine` configuration."""
        return cls.of((checkpoint_engine.engine_kwargs or {}).get(BACKEND) or {})


def _table() -> list[tuple[str, Any, Any]]:
    """Returns each setting's name in verl's configuration, its type and its default."""
    rows: list[tuple[str, Any, Any]] = []
    own = {part.name: part.name for part in dataclasses.fields(Settings)[2:]}
    for kind, names in ((SenderOptions, _OF_SENDER), (UpdateOptions, _OF_UPDATE), (Settings, own)):
        hints, defaults = get_type_hints(kind), {part.name: part.default for part in dataclasses.fields(kind)}
        rows += [(name, hints[theirs], defaults[theirs]) for name, theirs in names.items()]
    return rows


def _plain(given: Any) -> Any:
    """Converts Hydra's dictionaries and lists to Python's."""
    if isinstance(given, Mapping):
        return {str(key): _plain(value) for key, value in given.items()}
    return list(given) if not isinstance(given, (str, bytes)) and hasattr(given, "__iter__") else given
