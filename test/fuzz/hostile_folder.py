"""Folders of snapshots as somebody hostile would leave them: one change after the other, made in place."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from fuzz.arbitrary import damaged
from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.snapshots.manifest import SUM_DIGITS, read_table
from sglang_reshard.landings.checked.checksum import RegionBatch, RegionSpec
from sglang_reshard.landings.checked.regions import Selection
from sglang_reshard.layout.regions import Box, Region

LIST, MANIFEST, INDEX = "snapshots.json", "snapshot.json", "model.safetensors.index.json"
WEIGHTS = "model-00001-of-00001.safetensors"
SECRET = b"a secret of somebody else " * 40
_NUMBERS = (0, 1, -1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**50, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63))
_TEXTS = ("", ".", "..", "../secret", "/etc/hostname", "a/b", "a\0b", "a\\b", "x" * 300, "\ud800", "*", ".hidden",
          "snapshot.json", "snapshots.json", "latest", "step-1", "step-2", "step-3", "step-9", "evil.bin", "é",
          WEIGHTS, INDEX, ".sglang-reshard-cache", "F64", "I4", "BOOL", "0" * 64)  # fmt: skip
_OTHERS = (None, True, [], {}, 1.5, 1e308, [[]], {"a": {}})


class HostileFolder:
    """A copy of a folder, whose files are links to those of the template: each is replaced before it is changed.

    forged  a manifest was made to agree with a changed file, so that what it lists may be loaded
    """

    def __init__(self, folder: Path, random: Random) -> None:
        self.folder, self.random, self.forged = folder, random, False
        self.secret = folder.parent / "secret"

    def change(self) -> None:
        changes: tuple[Callable[[Path], None], ...] = (
            self._damage, self._damage, self._resize, self._json, self._json, self._json, self._header, self._header,
            self._table, self._kind, self._kind, self._swap, self._extra, self._folder,
        )  # fmt: skip
        self.random.choice(changes)(self._step())

    def _step(self) -> Path:
        return self.folder / self.random.choice(("step-3", "step-3", "step-3", "step-2", "step-1"))

    def _file(self, step: Path) -> Path:
        within = [LIST, MANIFEST, MANIFEST, INDEX, WEIGHTS, WEIGHTS, WEIGHTS + ".delta"]
        name = self.random.choice(within)
        return self.folder / LIST if name == LIST else step / name

    def _read(self, path: Path) -> bytes:
        return path.read_bytes() if path.exists() and stat.S_ISREG(path.lstat().st_mode) else b""

    def _write(self, path: Path, data: bytes) -> None:
        if not _remove(path):
            return
        path.write_bytes(data)
        if self.random.random() < 0.5:
            self._forge(path, data)

    def _forge(self, path: Path, data: bytes) -> None:
        """Makes the manifest agree with a file."""
        manifest = path.parent / MANIFEST
        try:
            described = json.loads(self._read(manifest))
            name = path.name.removesuffix(".delta")
            if path.name.endswith(".delta"):
                described["files"][name]["delta_bytes"] = len(data)
            else:
                described["files"][name] |= {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                if self.random.random() < 0.7:  # else checksums of the tensors are left, of which one is wrong
                    described["files"][name] |= _checksums(data)
        except (ValueError, KeyError, TypeError, Mismatch):
            return
        if _remove(manifest):
            manifest.write_text(json.dumps(described))
            self.forged = True

    def _damage(self, step: Path) -> None:
        path = self._file(step)
        self._write(path, damaged(self._read(path), self.random))

    def _resize(self, step: Path) -> None:
        path = self._file(step)
        data = self._read(path)
        size = self.random.choice((0, 1, 7, 8, 9, len(data) - 1, len(data) // 2, len(data) + 1, 2 * len(data)))
        self._write(path, (data + bytes(len(data) + 1))[: max(size, 0)])

    def _json(self, step: Path) -> None:
        path = self.random.choice((self.folder / LIST, step / MANIFEST, step / MANIFEST, step / INDEX))
        try:
            content = json.loads(self._read(path))
        except ValueError:
            return
        for _ in range(self.random.choice((1, 1, 2))):
            content = self._edited(content)
        self._write(path, json.dumps(content).encode())

    def _edited(self, value: Any) -> Any:
        """A value with one field changed to one at a boundary, renamed, left out or repeated."""
        random = self.random
        if isinstance(value, (dict, list)) and value and random.random() < 0.9:
            if isinstance(value, list):
                at = random.randrange(len(value))
                edit = random.choice((lambda: [], lambda: [value[at]] * 2, lambda: [self._edited(value[at])]))()
                return [*value[:at], *edit, *value[at + 1 :]]
            key = random.choice(list(value))
            rest = {k: v for k, v in value.items() if k != key}
            action = random.random()
            if action < 0.1:
                return rest
            if action < 0.3:
                return {**rest, random.choice(_TEXTS): value[key]}
            if action < 0.35:
                return {**value, random.choice(_TEXTS): value[key]}
            return {**value, key: self._edited(value[key])}
        near = (value - 1, value + 1, -value) if isinstance(value, int) else ()
        return random.choice((*near, random.choice(_NUMBERS), random.choice(_TEXTS), random.choice(_OTHERS)))

    def _header(self, step: Path) -> None:
        """Edits the table of a file of safetensors, whose length is right then, or wrong on purpose."""
        path = step / WEIGHTS
        data = self._read(path)
        length = int.from_bytes(data[:8], "little")
        try:
            text = json.dumps(self._edited(json.loads(data[8 : 8 + length]))).encode()
        except ValueError:
            return
        said = self.random.choice((len(text), len(text), len(text), *_NUMBERS)) & (2**64 - 1)
        changed = said.to_bytes(8, "little") + text + data[8 + length :]
        self._write(path, changed)
        if self.random.random() < 0.7 and _is_file(path):
            self._forge(path, changed)

    def _table(self, step: Path) -> None:
        """Puts numbers at boundaries into the table, or the counts, of a delta."""
        path = step / (WEIGHTS + ".delta")
        data = bytearray(self._read(path))
        if len(data) < 100:
            return
        words = np.frombuffer(data, "<i4", len(data) // 4)
        first = (8 + int.from_bytes(data[:8], "little")) // 4
        at = self.random.choice((0, 1, first, first + 1, first + 2, first + 3, self.random.randrange(len(words))))
        if 0 <= at < len(words):
            words[at] = self.random.choice((0, 1, 2, 3, 4, -1, 2**31 - 1, -(2**31), int(words[at]) ^ 1, 70_000))
        self._write(path, bytes(data))

    def _kind(self, step: Path) -> None:
        """Replaces a file by what is none."""
        path = self.random.choice((self._file(step), step))
        if not _remove(path):
            return
        target = self.random.choice(
            (str(self.secret), "../secret", "../../secret", path.name, "/dev/zero", "..", "nowhere",
             str(self.folder / "step-2" / WEIGHTS))
        )  # fmt: skip
        match self.random.choice(("link", "link", "fifo", "device", "folder", "socket", "gone")):
            case "link":
                path.symlink_to(target)
                if "secret" in target:
                    self._forge(path, SECRET)
            case "fifo":
                os.mkfifo(path)
            case "device" if os.getuid() == 0:
                try:
                    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
                except PermissionError:
                    path.symlink_to("/dev/zero")
            case "folder":
                path.mkdir()
            case "socket":
                with socket.socket(socket.AF_UNIX) as opened:
                    opened.bind(os.path.relpath(path))

    def _swap(self, step: Path) -> None:
        one, other = self._file(step), self._file(self._step())
        if _is_file(one) and _is_file(other) and one != other:
            spare = self.folder / "spare"
            os.rename(one, spare)
            os.rename(other, one)
            os.rename(spare, other)

    def _extra(self, step: Path) -> None:
        if step.is_dir() and not step.is_symlink():
            name = self.random.choice(("extra.safetensors", "pytorch_model.bin", "notes.txt", "x.delta", "config.json"))
            self._write(step / name, self.random.choice((b"", SECRET, self._read(step / WEIGHTS))))

    def _folder(self, step: Path) -> None:
        """Puts one snapshot's folder in place of another's."""
        other = self._step()
        if step != other and step.is_dir() and other.is_dir() and not step.is_symlink() and not other.is_symlink():
            spare = self.folder / "spare"
            os.rename(step, spare)
            os.rename(other, step)
            os.rename(spare, other)


def _checksums(data: bytes) -> dict[str, str]:
    """The fields of a manifest about the tensors of a file. Raises Mismatch for what is no safetensors."""
    table, batch = read_table(io.BytesIO(data), len(data), "a file"), RegionBatch()
    memory = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    for row, (spec, offset) in enumerate(table.tensors):
        region = RegionSpec.bits(spec.shape, Region.of(Box.whole(spec.shape)), spec.item_bytes)
        batch.add(region, memory[offset : offset + spec.nbytes].clone().view(region.dtype), row)
    sums = batch.checksums(len(table.tensors), Selection.full()).tolist()
    return {"table": table.sha256, "sums": "".join(f"{found:0{SUM_DIGITS}x}" for found in sums)}


def _is_file(path: Path) -> bool:
    return os.path.lexists(path) and stat.S_ISREG(path.lstat().st_mode)


def _remove(path: Path) -> bool:
    """Returns whether there is room for something of that name now: a folder that is gone stays so."""
    if not path.parent.is_dir() or path.parent.is_symlink():
        return False
    if os.path.lexists(path):
        if path.is_dir() and not path.is_symlink():
            for within in path.iterdir():
                _remove(within)
            path.rmdir()
        else:
            path.unlink()
    return True
