"""Opens files that anybody may have put in a folder: nothing but regular files of that folder. Locks them."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import BinaryIO

from sglang_reshard.errors import Mismatch

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO without a writer is not waited for
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}


def open_regular(folder: int, file: str, where: str) -> tuple[BinaryIO, os.stat_result]:
    """Opens a regular file of an open folder. A device is not even opened, unless it is put there in this moment.

    Raises Mismatch for anything else, and OSError. `where`: the file's name in errors.
    """
    _check_regular(os.stat(file, dir_fd=folder, follow_symlinks=False), where)
    opened = open(os.open(file, _FILE_FLAGS, dir_fd=folder), "rb")  # noqa: SIM115 (the caller closes it)
    try:
        found = os.fstat(opened.fileno())
        _check_regular(found, where)
    except BaseException:
        opened.close()
        raise
    return opened, found


def lock(descriptor: int) -> bool | None:
    """Locks an open file or folder. Returns False if another descriptor has, None on file systems without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_folder(path: Path) -> bool:
    """Returns whether there is a folder, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _check_regular(found: os.stat_result, where: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Mismatch(f"{where} is {_KINDS.get(stat.S_IFMT(found.st_mode), 'a device')}, not a file")
