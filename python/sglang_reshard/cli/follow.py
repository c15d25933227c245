"""`sglang-reshard follow`: lets one server load each new snapshot of a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.cli.outcome import DONE, REFUSED, line_of
from sglang_reshard.errors import Mismatch, ReshardError
from sglang_reshard.extras.snapshots.follower import SnapshotFollower


def run(
    folder: str,
    url: str,
    cache: Path | None,
    keys: tuple[str | None, str | None],
    interval_s: float,
    *,
    once: bool,
    **options: Any,
) -> int:
    """Returns the exit code, if it looks only once; else it goes on until it is interrupted.

    keys     api_key and admin_api_key of the server
    options  of `SnapshotFollower`

    With `once` it raises Mismatch if the folder does not exist or the server has another protocol, and
    EngineUnreachable if the server does not answer.
    """
    engine = RemoteEngine(url, api_key=keys[0], admin_api_key=keys[1])
    follower = SnapshotFollower(folder, engine, cache, **options)
    if not follower.folder_exists:
        if once:
            raise Mismatch(f"the folder {folder} does not exist; pass the one that the trainer's Snapshots writes to")
        typer.echo(f"the folder {folder} does not exist yet; waiting for its first snapshot", err=True)
    if once:
        engine.check()  # of an empty folder nothing else would reach the server
    told = ""
    while True:
        loaded, failure = _look(follower, url, cache is not None)
        if failure and failure != told:
            typer.echo(failure, err=True)
        if once:
            if not follower.listed:
                typer.echo(f"the folder {folder} has no snapshot yet")
            elif not (loaded or failure or follower.refused):
                typer.echo(f"{url}: nothing to load, the folder {folder} has no snapshot after the server's weights")
            return REFUSED if failure or follower.refused else DONE
        told = failure
        time.sleep(interval_s)


def _look(follower: SnapshotFollower, url: str, cached: bool) -> tuple[str | None, str]:
    """Returns the snapshot that was loaded, if any, and the failure of the server; empty if it did not fail.

    The follower logs what is wrong with snapshots.
    """
    try:
        name = follower.poll()
    except (ReshardError, OSError) as error:
        return None, line_of(error)
    if name is not None:
        fetched = f", {follower.read_bytes:,} of the folder read into the cache" if cached else ""
        typer.echo(f"{url}: {name}, {follower.loaded_bytes:,} bytes loaded{fetched}")
    return name, ""
