"""Whether the demo fits into this machine's memory, before anything is started."""

from __future__ import annotations

from pathlib import Path

GIB = 1024**3

# Measured as the fall of available memory at TP=16 and TP=2 (CPU, torch 2.11, sglang 0.5.12): most of it
# is what a process imports, not the model.
ENGINE_RANK_BYTES = int(0.75 * GIB)
TRAINER_RANK_BYTES = int(0.7 * GIB)
# The launcher, torchrun, the engine's own processes next to its ranks, checkpoints in a /tmp of memory.
FIXED_BYTES = int(1.5 * GIB)

_SIZES = (1, 2, 4, 8, 16, 32)


def needed_bytes(source_tp: int, target_tp: int) -> int:
    return FIXED_BYTES + source_tp * TRAINER_RANK_BYTES + target_tp * ENGINE_RANK_BYTES


def available_bytes() -> int:
    """What the system can still give, or the container this runs in, whichever is less."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def fitting_sizes(source_tp: int, target_tp: int, available: int) -> list[tuple[int, int]]:
    """Up to three (source, target) sizes that fit, nearest to what was asked first."""
    fitting = [
        (source, target)
        for source in _SIZES
        for target in _SIZES
        if source <= source_tp and target <= target_tp and needed_bytes(source, target) <= available
        # A demo of resharding: sizes that differ.
        if source != target
    ]
    return sorted(fitting, key=lambda sizes: needed_bytes(*sizes), reverse=True)[:3]


def complaint(source_tp: int, target_tp: int, available: int) -> str | None:
    """Why these sizes cannot run here and which can, or None when they can."""
    needed = needed_bytes(source_tp, target_tp)
    if needed <= available:
        return None
    text = (
        f"SOURCE_TP={source_tp} TARGET_TP={target_tp} needs about {needed / GIB:.1f} GiB of memory and "
        f"{available / GIB:.1f} GiB are available. "
    )
    sizes = fitting_sizes(source_tp, target_tp, available)
    if not sizes:
        return text + f"No sizes fit; {needed_bytes(1, 2) / GIB:.1f} GiB are needed at least."
    return (
        text
        + "These fit: "
        + "; ".join(f"SOURCE_TP={s} TARGET_TP={t} ({needed_bytes(s, t) / GIB:.1f} GiB)" for s, t in sizes)
    )


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such controller, or "max"
        return None
