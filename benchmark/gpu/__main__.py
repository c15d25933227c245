"""Runs the battery: `python -m benchmark.gpu [--rehearse] [--only NUMBER|WORD ...] [--resume] [--out FILE]`.

A JSON line for each item with what was expected and what was seen, and a verdict at the end. Items that tell most come
first, results are written after each, and `--resume` goes on with those that have not passed. It needs torch with CUDA
and what `packages` names, and no SGLang. On a host without a GPU it is rehearsed on virtual ones, and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.gpu import packages


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="on virtual GPUs, also where there is a real one")
    parser.add_argument("--card", type=int, default=78, metavar="GIB", help="memory of the card that is rehearsed")
    parser.add_argument("--only", nargs="+", default=[], metavar="ITEM", help="numbers, or words of their names")
    parser.add_argument("--resume", action="store_true", help="keep the results of items that have passed here")
    parser.add_argument("--within", type=float, default=440.0, metavar="SECONDS", help="for all items")
    parser.add_argument("--spawn", action="store_true", help="start each process anew: slow, should forks fail")
    parser.add_argument("--out", type=Path, help="file for the results; by default benchmark/results/gpu.json")
    options = parser.parse_args()
    packages.find()
    # Before torch is imported. Its own check would begin to use the GPU, and then no process could be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # the host may have no network, and no name of its own
        os.environ.setdefault(name, "lo")
    rehearsed = options.rehearse or not any(Path("/dev").glob("nvidia[0-9]*"))
    if rehearsed:
        from benchmark.gpu import rehearsal

        rehearsal.prepare()
        rehearsal.preload()
        with rehearsal.folder() as folder:
            return _run(options, folder)
    return _run(options, "")


def _run(options: argparse.Namespace, folder: str) -> int:
    import msgspec

    with contextlib.suppress(ImportError):  # once for all processes that are forked; it does not use the GPU
        import sglang_reshard.copying.copy_kernel  # noqa: F401
    from benchmark.gpu import facts, items, runner
    from benchmark.gpu.item import Row
    from benchmark.gpu.peer import PeerFailed
    from benchmark.gpu.place import Place

    place = Place("battery", folder, options.card, start="spawn" if options.spawn else "fork")
    chosen = items.chosen(options.only)
    try:
        found = facts.of(place)
    except PeerFailed as error:
        print(json.dumps({"forks cannot use the GPU; each process is started anew": str(error)}), flush=True)
        place = dataclasses.replace(place, start="spawn")
        found = facts.of(place)
    begin = time.monotonic()
    print(json.dumps({"host": found}), flush=True)
    path = options.out or (None if folder else facts.RESULTS)
    command = " ".join(["python -m benchmark.gpu", *sys.argv[1:]])
    rows: list[Row] = facts.passed(path, found) if path and options.resume else []
    known = {row.name for row in rows}
    chosen = tuple(item for item in chosen if item.name not in known)
    for row in runner.run(chosen, place, found["count"], options.within if not folder else math.inf):
        rows.append(row)
        print(json.dumps(msgspec.to_builtins(row)), flush=True)
        if path:  # after each, should something end this one
            facts.save(path, found, rows, command, _verdict(rows, bool(folder)))
    verdict = _verdict(rows, bool(folder))
    print(json.dumps({"verdict": verdict, "seconds": round(time.monotonic() - begin, 1)}), flush=True)
    return 1 if any(row.verdict == "fail" for row in rows) else 0


def _verdict(rows: Sequence[Any], rehearsed: bool) -> str:
    counts = {kind: sum(row.verdict == kind for row in rows) for kind in ("pass", "fail", "skipped")}
    text = f"{counts['pass']} passed, {counts['fail']} failed, {counts['skipped']} skipped"
    failed = ", ".join(row.name for row in rows if row.verdict == "fail")
    return ("rehearsed: no GPU; " if rehearsed else "") + text + (f" ({failed})" if failed else "")


if __name__ == "__main__":
    sys.exit(main())
