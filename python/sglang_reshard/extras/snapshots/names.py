"""Checks names in a folder of snapshots, which anybody may have written: each is one component of a path."""

from __future__ import annotations

from sglang_reshard.errors import Mismatch

LATEST = "latest"
MANIFEST, LIST = "snapshot.json", "snapshots.json"
CACHE_MARK = ".sglang-reshard-cache"  # in a cache, whose other files may be deleted
DELTA = ".delta"  # suffix of what has changed of a file since the snapshot before

_NAME_BYTES = 255  # of one component, on every file system
_ROOM = len(".") + len(".partial")  # around a snapshot's name, while it is written
PATTERNS = frozenset("*?[]")  # an object store's client expands them


def check_snapshot_name(name: str, where: str = "") -> None:
    """Raises Mismatch unless this can be the name of a snapshot. where: the file that has it, if one does"""
    bad = (
        not _is_component(name, _NAME_BYTES - _ROOM)
        or name.startswith(".")
        or name in (LATEST, LIST)
        or not PATTERNS.isdisjoint(name)
    )
    if bad:
        raise Mismatch(
            f"{where}{': ' if where else ''}{name[:_NAME_BYTES]!r} cannot be the name of a snapshot: pass a valid "
            f"folder name of at most {_NAME_BYTES - _ROOM} bytes, without a leading dot and without any of / \\ * ? [ ]"
        )


def check_file_name(name: str, where: str) -> None:
    """Raises Mismatch unless this can be the name of a file of the snapshot that `where` describes."""
    if not _is_component(name, _NAME_BYTES - len(DELTA)) or name in (MANIFEST, CACHE_MARK):
        raise Mismatch(f"{where} lists {name[:_NAME_BYTES]!r}, which cannot be the name of a file in a snapshot")


def _is_component(name: str, most_bytes: int) -> bool:
    if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        return False
    return len(name.encode(errors="replace")) <= most_bytes
