"""python -m benchmark.soak [--updates N] [--every N]: run, print, and write benchmark/results/soak.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmark import pages
from benchmark.soak import launcher, rows
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest import children

# A start, stock loads at the end, and what an update takes at most on a machine that is shared.
_FIXED_S, _UPDATE_S = 900.0, 5.0


def main() -> int:
    """The exit status: 0 when every claim holds, 1 when one does not or something broke, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.soak", description=__doc__)
    parser.add_argument("--updates", type=_positive, default=2000)
    parser.add_argument("--every", type=_positive, default=50, help="verify the first version in full, and every N-th")
    parser.add_argument("--out", type=Path, help="another file for the results; no document is written then")
    arguments = parser.parse_args()
    progress = Console(stderr=True)
    soak = launcher.Soak(arguments.updates, arguments.every, _FIXED_S + _UPDATE_S * arguments.updates)
    try:
        with children.sigterm_as_interrupt():
            found = launcher.run(soak, progress)
    except KeyboardInterrupt:
        progress.print("Stopped; all processes of the soak are ended.", highlight=False)
        return 130
    except ReshardError as error:
        progress.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    command = " ".join(["python -m benchmark.soak", *sys.argv[1:]])
    pages.publish("soak", command, rows.rows(soak, found), out=arguments.out)
    print("\n".join(rows.said(found)))
    return 0 if found.ok else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
