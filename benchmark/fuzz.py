"""Many cases of the fuzz tests, over all cores: `python -m benchmark.fuzz --cases 1000000`.

Every test gets as many cases as any other, but for those whose cases take long. A process runs tests of one file;
cases are drawn by its seed, so the same command runs the same cases. Exits with 1 unless all tests pass.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmark import pages, results
from benchmark.results import Rows

FOLDER = "test/fuzz"
# Of tests whose cases take milliseconds, the part of all cases that each gets.
SHARES = {
    "test_every_element_lands_and_nothing_else_is_written": 0.02,
    "test_an_engine_refuses_and_keeps_its_weights_or_takes_the_new_ones": 0.01,
    "test_changed_claims_are_refused_or_vouched_for": 0.02,
    "test_a_server_gets_right_weights_or_none_and_its_follower_goes_on": 0.02,
    "test_changed_orders_are_refused_or_carried_out": 0.03,
    "test_pieces_are_the_tensor": 0.03,
    "test_a_server_goes_on_serving_whatever_strangers_say": 0.02,
    "test_a_server_goes_on_serving_whatever_those_say_who_know_the_key": 0.02,
    "test_updates": 0.01,
    "test_shares": 0.01,
    "test_probes": 0.01,
    "test_pulls": 0.005,
}
_COLLECT_S, _DEADLINE_S = 300.0, 7200.0
_TEST = re.compile(rf"^({FOLDER}/\S+?::\w+):$")
_CASES = re.compile(r"(\d+) passing, (\d+) failing, and (\d+) invalid")
_SECONDS = re.compile(r"during generate phase \(([\d.]+) seconds\)")


class Job(NamedTuple):
    """What one process runs: tests of one file, so many cases of each."""

    tests: tuple[str, ...]
    cases: int
    seed: int


def collected(only: str = "") -> list[str]:
    """The fuzz tests whose names contain `only`, as pytest names them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", FOLDER]
    done = subprocess.run(command, cwd=results.REPOSITORY, capture_output=True, text=True, timeout=_COLLECT_S)
    if done.returncode:
        raise SystemExit(f"the fuzz tests cannot be collected:\n{done.stdout}{done.stderr}")
    return [
        line for line in done.stdout.splitlines() if line.startswith(f"{FOLDER}/") and "::" in line and only in line
    ]


def jobs(tests: Sequence[str], cases: int, seed: int) -> list[Job]:
    """All cases, spread over the tests; what takes longest comes first."""
    slow = [test for test in tests if _name(test) in SHARES]
    quick = [test for test in tests if test not in slow]
    whole = 1.0 if quick else sum(SHARES[_name(test)] for test in slow)
    shares = {test: round(SHARES[_name(test)] / whole * cases) for test in slow}
    left = cases - sum(shares.values())
    each = -(-left // max(1, len(quick)))
    files: dict[str, list[str]] = {}
    for test in quick:
        files.setdefault(test.split("::")[0], []).append(test)
    groups: list[tuple[tuple[str, ...], int]] = [((test,), shares[test]) for test in slow]
    groups += [(tuple(found), each) for found in sorted(files.values(), key=len, reverse=True)]
    return [Job(group, max(1, count), seed + number) for number, (group, count) in enumerate(groups)]


def run(todo: Sequence[Job], console: Console) -> Rows:
    """As many processes at a time as there are cores."""
    processes: list[subprocess.Popen[str]] = []
    rows: Rows = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for found, output in pool.map(lambda job: _run(job, processes), todo):
                for row in found:
                    console.print(f"{row['test']}: {row['cases']:,} cases, {row['outcome']}", highlight=False)
                if any(row["outcome"] != "passed" for row in found):
                    console.print(output[-20_000:], highlight=False, markup=False)
                rows += found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
    return rows


def _run(job: Job, processes: list[subprocess.Popen[str]]) -> tuple[Rows, str]:
    """Returns the rows of a job, and the output of its process, which is added to `processes`."""
    options = ("-q", "-p", "no:cacheprovider", "--timeout=0", "--hypothesis-show-statistics")
    environment = os.environ | {
        "SGLANG_RESHARD_FUZZ_EXAMPLES": str(job.cases),
        "SGLANG_RESHARD_FUZZ_SEED": str(job.seed),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *job.tests],
        cwd=results.REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    processes.append(process)
    outcome = "passed"
    try:
        text = process.communicate(timeout=_DEADLINE_S)[0]
        if process.returncode < 0:
            outcome = f"ended the process: {signal.Signals(-process.returncode).name}"
    except subprocess.TimeoutExpired:
        process.kill()
        text, outcome = process.communicate()[0], f"did not end within {_DEADLINE_S:.0f} s"
    return _rows(job, text, process.returncode, outcome), text


def _rows(job: Job, text: str, status: int, outcome: str) -> Rows:
    """What became of a job's tests; those that have no cases are left out, unless they fail.

    cases: that were run, without those that were no case after all. seed: of the process.
    """
    ran = _statistics(text.splitlines())
    found = []
    for test in job.tests:
        cases, seconds = ran.get(test, (0, 0.0))
        said = "failed" if f"FAILED {test}" in text or f"ERROR {test}" in text else outcome
        if said == "passed" and status and not any(f"{kind} {FOLDER}" in text for kind in _BAD):
            said = f"pytest ended with {status}"
        if cases or said != "passed":
            name = test.removeprefix(f"{FOLDER}/")
            found.append({"test": name, "cases": cases, "seconds": seconds, "seed": job.seed, "outcome": said})
    return found


_BAD = ("FAILED", "ERROR")


def _statistics(lines: Iterable[str]) -> dict[str, tuple[int, float]]:
    """Test -> its cases and seconds, from what hypothesis says of the phase in which it makes cases."""
    found: dict[str, tuple[int, float]] = {}
    test, seconds = "", None
    for line in lines:
        if named := _TEST.match(line):
            test = named[1]
        elif timed := _SECONDS.search(line):
            seconds = float(timed[1])
        elif seconds is not None and (counted := _CASES.search(line)):
            found[test] = int(counted[1]) + int(counted[2]), seconds
            seconds = None
    return found


def _name(test: str) -> str:
    return test.split("::")[1]


def main() -> int:
    """The exit status: 0 when all tests passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="of all tests together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="tests whose names contain this")
    parser.add_argument("--out", type=Path, help="another file for the results; no document is written then")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes are ended, too
    console = Console() if sys.stdout.isatty() else Console(width=140)
    started = time.monotonic()
    rows = run(jobs(collected(arguments.only), arguments.cases, arguments.seed), console)
    rows.sort(key=lambda row: row["test"])
    seconds = time.monotonic() - started
    cases = sum(row["cases"] for row in rows)
    console.print(f"{cases:,} cases in {seconds:.0f} s, {cases / seconds:,.0f} a second", highlight=False)
    command = f"python -m benchmark.fuzz --cases {arguments.cases} --seed {arguments.seed}"
    command += f" --only {arguments.only}" if arguments.only else ""
    pages.publish("fuzz", command, rows, [f"{cases} cases in {seconds:.0f} s"], arguments.out)
    return 0 if rows and all(row["outcome"] == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
