"""The commit that results are of."""

from __future__ import annotations

import subprocess
from pathlib import Path

_REPOSITORY = Path(__file__).parents[1]


def commit() -> str:
    """With a plus if the tree has changes; what the file COMMIT says, which a bundle has in place of a repository."""
    said = _REPOSITORY / "COMMIT"
    if said.exists():
        return said.read_text().strip()
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()
