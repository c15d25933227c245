"""The commit that results are of."""

from __future__ import annotations

import subprocess
from pathlib import Path

_REPOSITORY = Path(__file__).parents[1]


def commit() -> str:
    """With a plus if the tree has changes; what the file COMMIT says, which a bundle has in place of a repository.

    Results do not count as changes: a command that writes several files would be none of a commit after the first.
    """
    said = _REPOSITORY / "COMMIT"
    if said.exists():
        return said.read_text().strip()
    changes = _git("status", "--porcelain", "--untracked-files=no", ":/", ":!benchmark/results", ":!docs/results")
    return _git("rev-parse", "--short=12", "HEAD") + "+" * bool(changes)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False).stdout.strip()
