"""`sglang-reshard follow`: lets one server load each new snapshot of a folder."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.errors import ReshardError
from sglang_reshard.snapshots.follower import SnapshotFollower


def run(
    folder: str,
    url: str,
    cache: Path | None,
    keys: tuple[str | None, str | None],
    interval_s: float,
    *,
    once: bool,
) -> int:
    """Returns the exit status, if it looks only once; else it goes on until it is interrupted.

    keys  api_key and admin_api_key of the server
    """
    try:
        follower = SnapshotFollower(folder, RemoteEngine(url, api_key=keys[0], admin_api_key=keys[1]), cache)
    except ReshardError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        return 1
    while True:
        status = _look(follower, url)
        if once:
            return status
        time.sleep(interval_s)


def _look(follower: SnapshotFollower, url: str) -> int:
    try:
        name = follower.poll()
    except (ReshardError, OSError) as error:  # of the server, or of where the snapshots are
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        return 1
    if name is not None:
        typer.echo(f"{url}: {name}, {follower.read_bytes:,} bytes read")
    return 0
