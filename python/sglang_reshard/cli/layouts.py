"""Layouts of a trainer, `fsdp=4,tp=2`, and of an engine, `tp=8,ep=8`, as command lines give them."""

from __future__ import annotations

import re
from typing import ClassVar, TypeVar

import msgspec

from sglang_reshard.errors import Mismatch
from sglang_reshard.nearest import nearest

_MAX_RANKS = 1 << 16  # of either side


class Source(msgspec.Struct, frozen=True):
    """A trainer's device mesh, outermost dimension first.

    replicas  groups that hold the same shards (HSDP), of
    fsdp      ranks that shard every parameter by FSDP2, each a group of
    tp        ranks that shard it by tensor parallelism first
    """

    examples: ClassVar[str] = "tp=4, fsdp=64, fsdp=8,tp=8 or hsdp=2x32, which is replicas=2,fsdp=32"
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

    examples: ClassVar[str] = "tp=16, or tp=16,ep=16,dp=16"
    tp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        """Those of DP attention are tensor parallel ranks."""
        return self.tp

    @property
    def arguments(self) -> dict[str, int | bool]:
        """The arguments of `sglang.Engine`."""
        attention = {"dp_size": self.dp, "enable_dp_attention": True} if self.dp > 1 else {}
        return {"tp_size": self.tp, "ep_size": self.ep, **attention}

    def __str__(self) -> str:
        return _text(self, "tp")


class StagedTarget(Target, frozen=True):
    """An engine's parallelism with pipeline stages, SGLang's --pp-size."""

    examples: ClassVar[str] = f"{Target.examples}, or tp=8,pp=2"
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.tp


_Layout = TypeVar("_Layout", bound=Source | Target)


def parsed(text: str, kind: type[_Layout], option: str) -> _Layout:
    """Returns the layout that the text of an option gives.

    Raises Mismatch for a name that `kind` does not have, for a size that is no positive number or is given twice, for
    more ranks than are supported, and for expert or attention groups that do not divide an engine's ranks.
    """
    given: dict[str, int] = {}
    known = [*kind.__struct_fields__, *(["hsdp"] if kind is Source else [])]
    for part in map(str.strip, text.split(",")):
        name, _, size = part.partition("=")
        names, sizes = (("replicas", "fsdp"), size.split("x")) if name == "hsdp" else ((name,), [size])
        if name not in known or len(names) != len(sizes) or not all(re.fullmatch(r"[1-9]\d{0,5}", n) for n in sizes):
            raise Mismatch(
                f"{option} {text}: cannot parse {part!r}; expected NAME=SIZE, a positive size, as in {kind.examples}"
                f"{'' if name in known else nearest(name, known)}"
            )
        if again := given.keys() & names:
            raise Mismatch(
                f"{option} {text}: {part!r} gives {again.pop()} a second size; use it once, as in {kind.examples}"
            )
        given |= dict(zip(names, map(int, sizes), strict=True))
    found = kind(**given)
    for name, meaning in (("ep", "expert parallel groups"), ("dp", "groups of DP attention")):
        if found.tp % (groups := getattr(found, name, 1)):
            raise Mismatch(f"{option} {text}: tp={found.tp} is not divisible by {name}={groups}, the {meaning}")
    if found.ranks > _MAX_RANKS:
        raise Mismatch(f"{option} {text}: these are {found.ranks:,} ranks, of at most {_MAX_RANKS:,}")
    return found


def _text(sizes: Source | Target, always: str = "") -> str:
    named = {name: getattr(sizes, name) for name in sizes.__struct_fields__}
    return ",".join(f"{name}={size}" for name, size in named.items() if size > 1 or name == always)
