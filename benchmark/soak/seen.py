"""What trainer rank 0 writes down: a line of JSON for every update, and one more where a version is verified.

To a file and not to a list: the process that is watched for growth must not grow by being watched.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmark.soak.footprint import Footprint


class Updated(msgspec.Struct, frozen=True, tag="updated"):
    """seconds    of the whole update, the wait for running requests included
    since      seconds since the first update began, with all that was looked at meanwhile
    processes  name -> what it holds then
    """

    version: int
    seconds: float
    since: float
    processes: dict[str, Footprint]
    shared_memory_bytes: int


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """What the engine had when a version was verified.

    tokens   greedy continuations of `expected.PROMPTS`
    digests  per engine rank, path of a live tensor -> digest of its bytes
    """

    version: int
    tokens: list[list[int]]
    digests: list[dict[str, str]]


def append(file: Path, line: Updated | Verified) -> None:
    with file.open("ab") as f:
        f.write(msgspec.json.encode(line) + b"\n")


def read(file: Path) -> tuple[list[Updated], list[Verified]]:
    decoder = msgspec.json.Decoder(Updated | Verified)
    with file.open("rb") as f:
        lines = list(map(decoder.decode, f))
    return [line for line in lines if isinstance(line, Updated)], [line for line in lines if isinstance(line, Verified)]
