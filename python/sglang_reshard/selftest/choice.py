"""Chooses the runs of a self-test for a host: the most important first. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang_reshard.cli.layouts import Source, Target
from sglang_reshard.errors import Unsupported
from sglang_reshard.selftest.host import Host
from sglang_reshard.selftest.job import Run
from sglang_reshard.selftest.models import TINY, TINY_MOE

GIB = 1 << 30
# Measured as the fall of available memory at TP=16 and TP=2 (CPU, torch 2.11, sglang 0.5.12): most of it is what a
# process imports, not the model.
_ENGINE_RANK_BYTES, _TRAINER_RANK_BYTES, _FIXED_BYTES = int(0.75 * GIB), int(0.7 * GIB), int(1.5 * GIB)
_SIZES = (16, 8, 4, 2, 1)

WHOLE = ("first update", "bits", "limits", "SGLang's own update", "routes", "verified", "asleep", "prefix cache")
SHORT = ("first update", "bits", "routes")
MISHAPS = ("mishaps",)
ROUTES = ("auto", "p2p", "broadcast")
# SGLang's cache in host memory keeps what its pool on the GPU has no room for.
HIERARCHICAL = {
    "enable_memory_saver": False,
    "max_total_tokens": 512,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 8.0,
}


def runs(host: Host, wanted: Wanted) -> list[Run]:
    """Returns the runs, in order. Raises Unsupported for layouts that do not fit on the host, with one that does."""
    if wanted.source is not None or wanted.target is not None:
        return [_asked(host, wanted), _mishaps(host, wanted.model)]
    found = _on_gpus(host, wanted.model) if host.gpus else _on_cpus(host, wanted.model)
    if wanted.routes == ROUTES:
        return found
    return [msgspec.structs.replace(run, routes=wanted.routes) for run in found]


class Wanted(msgspec.Struct, frozen=True):
    """The options of a user. None, or an empty model: chosen for the host."""

    source: Source | None = None
    target: Target | None = None
    model: str = ""
    routes: tuple[str, ...] = ROUTES


def needed_bytes(source: Source, target: Target) -> int:
    """Returns the bytes of memory that a run takes on a host without GPUs."""
    return _FIXED_BYTES + source.ranks * _TRAINER_RANK_BYTES + target.ranks * _ENGINE_RANK_BYTES


def _on_cpus(host: Host, model: str) -> list[Run]:
    source = Source(tp=4) if _fits(host, Source(tp=4), Target(tp=8)) else Source(tp=2)
    sizes = [tp for tp in _SIZES if tp != source.tp and _fits(host, source, Target(tp=tp))]
    if not sizes:
        least = needed_bytes(Source(tp=2), Target(tp=1)) / GIB
        raise Unsupported(
            f"this host has {host.memory_bytes / GIB:.1f} GiB of memory available; the self-test needs {least:.1f} GiB"
        )
    grown, few = Target(tp=sizes[0]), Target(tp=2)
    return [
        _run("expanding", source, grown, model or TINY, "float32", WHOLE, ROUTES),
        _run("experts", Source(fsdp=2), Target(tp=2, ep=2), model or TINY_MOE, "bfloat16", SHORT),
        _mishaps(host, model),
        _run("contracting", Source(fsdp=2, tp=2), few, model or TINY, "bfloat16", SHORT),
        _run("HSDP", Source(replicas=2, fsdp=2), few, model or TINY, "bfloat16", SHORT),
    ]


def _on_gpus(host: Host, model: str) -> list[Run]:
    count, dense, experts = len(host.gpus), model or _dense(host), model or "qwen3-moe"
    every = tuple(range(count))
    engine = Target(tp=_power_of_two(count))
    sharing = Source(fsdp=count if count > 1 else 4)
    found = [
        _run("colocated", sharing, engine, dense, "bfloat16", WHOLE, ROUTES, every, every[: engine.tp]),
        _run("experts", sharing, Target(tp=engine.tp, ep=engine.tp), experts, "bfloat16", WHOLE, ("auto",), every,
             every[: engine.tp]),
        _mishaps(host, model),
        msgspec.structs.replace(
            _run("cache in host memory", Source(), Target(), model or "qwen3-1.7b", "bfloat16", ("prefix cache",),
                 ("auto",), every[:1], every[:1]), engine=HIERARCHICAL),
    ]  # fmt: skip
    if count < 2:
        return found
    half = _power_of_two(count // 2)
    trainer, own = every[:half], every[-half:]
    apart = [
        _run("apart", Source(fsdp=half), Target(tp=half), dense, "bfloat16", WHOLE, ROUTES, trainer, own),
        _run("expanding", Source(tp=half), Target(tp=engine.tp), dense, "bfloat16", SHORT, ROUTES, trainer, every),
        _run("contracting", Source(tp=engine.tp), Target(tp=half), dense, "bfloat16", SHORT, ROUTES, every, own),
    ]
    if count >= 4:
        apart.append(_run("HSDP", Source(replicas=2, fsdp=count // 2), engine, dense, "bfloat16", SHORT, ("auto",),
                          every, every[: engine.tp]))  # fmt: skip
    return [found[0], apart[0], *found[1:], *apart[1:]]


def _asked(host: Host, wanted: Wanted) -> Run:
    source, target = wanted.source or Source(fsdp=2), wanted.target or Target(tp=2)
    every = tuple(range(len(host.gpus)))
    if every and target.ranks > len(every):
        raise Unsupported(f"--target {target} needs {target.ranks} GPUs, and this host has {len(every)}")
    if not every and not _fits(host, source, target):
        needed, there = needed_bytes(source, target) / GIB, host.memory_bytes / GIB
        fitting = next((tp for tp in _SIZES if _fits(host, Source(tp=2), Target(tp=tp))), 1)
        raise Unsupported(
            f"--source {source} --target {target} needs about {needed:.1f} GiB of memory, and {there:.1f} GiB are "
            f"available; --source tp=2 --target tp={fitting} fits"
        )
    # On GPUs of their own where there are enough.
    apart = source.ranks + target.ranks <= len(every)
    engine = every[-target.ranks :] if apart else every[: target.ranks]
    model = wanted.model or (_dense(host) if every else TINY_MOE if target.ep > 1 else TINY)
    trainer = every[: source.ranks] if apart else every
    return _run("asked for", source, target, model, "bfloat16", WHOLE, wanted.routes, trainer, engine)


def _mishaps(host: Host, model: str) -> Run:
    gpus = tuple(range(len(host.gpus)))
    target = Target(tp=min(2, len(gpus)) if gpus else 2)
    return _run("mishaps", Source(fsdp=2), target, model or TINY, "bfloat16", MISHAPS, ("auto",), gpus[:2],
                gpus[: target.tp])  # fmt: skip


def _run(name: str, source: Source, target: Target, model: str, dtype: str, parts: Sequence[str],
         routes: Sequence[str] = ("auto",), trainer_gpus: tuple[int, ...] = (),
         engine_gpus: tuple[int, ...] = ()) -> Run:  # fmt: skip
    usual_s = 30 + 6 * (source.ranks + target.ranks) + (30 if parts == WHOLE else 0)
    named = f"{name}: {source} -> {target}"
    return Run(named, source, target, model, dtype, trainer_gpus, engine_gpus, tuple(parts), tuple(routes), usual_s)


def _fits(host: Host, source: Source, target: Target) -> bool:
    return needed_bytes(source, target) <= host.memory_bytes


def _dense(host: Host) -> str:
    """The larger model where a card holds the engine, the trainer's part and transformers' float32."""
    return "qwen3-8b" if host.gpu_bytes >= 70 * GIB and len(host.gpus) > 1 else "qwen3-1.7b"


def _power_of_two(most: int) -> int:
    return 1 << (most.bit_length() - 1)
