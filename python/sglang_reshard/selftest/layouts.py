"""Layouts of a trainer, `fsdp=4,tp=2`, and of an engine, `tp=8,ep=8`."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from sglang_reshard.errors import Unsupported
from sglang_reshard.nearest import check_names


class Source(msgspec.Struct, frozen=True):
    """A trainer's device mesh.

    replicas  groups that hold the same shards (HSDP), of
    fsdp      ranks that shard every parameter by FSDP2, each a group of
    tp        ranks that shard it by tensor parallelism first
    """

    replicas: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.replicas * self.fsdp * self.tp

    def __str__(self) -> str:
        return _text(self) or "one trainer rank"


class Target(msgspec.Struct, frozen=True):
    """An engine's parallelism, as the options of SGLang name it: --tp-size, --ep-size, --dp-size with DP attention."""

    tp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp

    @property
    def arguments(self) -> dict[str, int | bool]:
        """The arguments of `sglang.Engine`."""
        attention = {"dp_size": self.dp, "enable_dp_attention": True} if self.dp > 1 else {}
        return {"tp_size": self.tp, "ep_size": self.ep, **attention}

    def __str__(self) -> str:
        return _text(self) or "tp=1"


_Layout = TypeVar("_Layout", Source, Target)


def parsed(text: str, kind: type[_Layout]) -> _Layout:
    """Returns what `fsdp=4,tp=2` says. Raises Unsupported for another name, and for a size that is no positive number.

    Raises it also for an engine whose expert or attention groups do not divide its ranks.
    """
    given: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if not size.isdecimal() or int(size) < 1:
            raise Unsupported(f"{part!r} is not of the form NAME=SIZE, with a positive size; an example: fsdp=4,tp=2")
        given[name.strip()] = int(size)
    try:
        check_names(kind.__name__.lower(), given, kind.__struct_fields__)
    except TypeError as error:
        raise Unsupported(str(error)) from None
    found = kind(**given)
    if isinstance(found, Target) and (found.tp % found.ep or found.tp % found.dp):
        raise Unsupported(f"{text}: ep and dp have to divide tp={found.tp}")
    return found


def _text(sizes: Source | Target) -> str:
    named = {name: getattr(sizes, name) for name in sizes.__struct_fields__}
    return ",".join(f"{name}={size}" for name, size in named.items() if size > 1)


def common_multiple(source: Source, target: Target) -> int:
    """Returns a number of heads that both sides can share out evenly."""
    return math.lcm(source.tp, target.tp)
