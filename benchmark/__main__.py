"""python -m benchmark [--quick] [--skip-scaling | --only-scaling]: measure, print, and write benchmark/results."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from benchmark import block_fp8, guard, launcher, pages, plots, results, scaling
from benchmark.cases import CASES, QUICK_CASES, QUICK_EFFORT, Effort
from sglang_reshard.selftest import children


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two cases, few updates by stock, no scaling curves")
    parser.add_argument("--skip-scaling", action="store_true", help="only the cases with a real engine")
    parser.add_argument("--only-scaling", action="store_true", help="only the curves, with processes standing in")
    parser.add_argument(
        "--only", metavar="TEXT", help="cases with TEXT in their name, in place of theirs in bench.json"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    # A table is cut at the width of a terminal that is not there: give it room in a log.
    console = Console() if sys.stdout.isatty() else Console(width=180)
    command = " ".join(["python -m benchmark", *sys.argv[1:]])

    ok = True
    if not arguments.only_scaling:
        ok = _cases(quick, arguments.only, command, console)
    if quick and not arguments.only:
        ok = block_fp8.main() == 0 and ok
    if not quick and not arguments.only and not arguments.skip_scaling:
        ok = _scaling(command, console) and ok
    return 0 if ok else 1


def _cases(quick: bool, only: str | None, command: str, console: Console) -> bool:
    """Whether every path that ran was bit-exact, and some did."""
    path = results.QUICK if quick else results.BENCH
    wanted = [case for case in (QUICK_CASES if quick else CASES) if only is None or only in case.name]
    found = launcher.run(wanted, QUICK_EFFORT if quick else Effort(), console)
    rows = found.rows
    if only is not None:  # the other cases' rows stay as they are
        head, known = results.load(path)
        measured = {case.name for case in wanted}
        rows = [row for row in known if row["case"] not in measured] + rows
        found.notes += [note for note in head["notes"] if not any(note.startswith(name) for name in measured)]
        command = f"{head['command']}; {command}"
    earlier, before = results.load(path) if path.exists() else (None, [])
    results.save(path, results.header(command, found.notes), rows)
    head, rows = results.load(path)
    print(pages.TABLES["benchmark"].text(path))
    for line in guard.worse(before, rows):
        console.print(f"worse than before: {line}", style="red")
    if earlier is not None and (why := guard.other_host(earlier, head)):
        console.print(f"another host: {why}")
    if rows and not quick:
        plots.plot_paths(rows, path.with_suffix(".png"))
        pages.write("figures", "benchmark")
    return bool(rows) and all(row["bit_exact"] for row in rows)


def _scaling(command: str, console: Console) -> bool:
    found, notes = scaling.run(scaling.CURVES, console)
    results.save(results.SCALING, results.header(command, notes), found)
    plots.plot_scaling(results.load(results.SCALING)[1], results.SCALING.with_suffix(".png"))
    return all(row["exact"] for row in found)


if __name__ == "__main__":
    with children.sigterm_as_interrupt():
        sys.exit(main())
