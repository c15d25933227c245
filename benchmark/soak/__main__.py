"""python -m benchmark.soak [--updates N] [--every N]: run, print, and write benchmark/results/soak.json."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from benchmark import results
from benchmark.soak import launcher, tables
from sglang_reshard.errors import ReshardError

SOAK = results.FOLDER / "soak.json"
# A start, stock loads at the end, and what an update takes at most on a machine that is shared.
_FIXED_S, _UPDATE_S = 900.0, 5.0


def main() -> int:
    """The exit status: 0 when every claim holds, 1 when one does not or something broke, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.soak", description=__doc__)
    parser.add_argument("--updates", type=_positive, default=2000)
    parser.add_argument("--every", type=_positive, default=50, help="verify the first version in full, and every N-th")
    parser.add_argument("--clients", type=_positive, default=3, help="every second one streams")
    parser.add_argument("--out", type=Path, default=SOAK, help="the file of results")
    parser.add_argument("--deadline-s", type=float, help="of the whole run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)  # so that being told to end ends the processes, too
    progress = Console(stderr=True)
    # A table is cut at the width of a terminal that is not there: give it room in a log.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    deadline_s = arguments.deadline_s or _FIXED_S + _UPDATE_S * arguments.updates
    soak = launcher.Soak(arguments.updates, arguments.every, arguments.clients, deadline_s)
    try:
        found = launcher.run(soak, progress)
    except KeyboardInterrupt:
        progress.print("Stopped; all processes of the soak are ended.", highlight=False)
        return 130
    except ReshardError as error:
        progress.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    command = " ".join(["python -m benchmark.soak", *sys.argv[1:]])
    results.save(arguments.out, results.header(command, []), tables.rows(soak, found))
    tables.print_found(console, found)
    return 0 if found.ok else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
