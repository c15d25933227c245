"""The comparisons of results notice every outcome that differs, and what got worse by more than noise."""

import copy
import json
import subprocess
import sys

import pytest

from benchmark import results
from benchmark.compare import differences, outcomes
from benchmark.guard import other_host, worse

FAULTS, ARCHITECTURES = (
    json.loads((results.FOLDER / name).read_text()) for name in ("faults.json", "architectures.json")
)


def compared(old, new):
    return list(differences(outcomes(old), outcomes(new)))


@pytest.mark.parametrize("found", [FAULTS, ARCHITECTURES])
def test_a_file_is_like_itself(found):
    assert len(outcomes(found)) > 50
    assert compared(found, copy.deepcopy(found)) == []


def test_seconds_and_words_are_no_outcome():
    faults, architectures = map(copy.deepcopy, (FAULTS, ARCHITECTURES))
    faults[0]["commit"] = "another"
    for row in faults[1:]:
        row["detect_s"] = 17.0
    for architecture in architectures["architectures"].values():
        for run in architecture["runs"].values():
            run["why"] = "other words"
    assert compared(FAULTS, faults) == compared(ARCHITECTURES, architectures) == []


def test_another_outcome_of_a_fault_is_named():
    new = copy.deepcopy(FAULTS)
    new[1]["outcome"] = "hang"
    (line,) = compared(FAULTS, new)
    assert line.startswith(", ".join(new[1][key] for key in ("fault", "phase", "transport")) + ": was ")
    assert line.endswith('is ["hang"]')


def test_rows_that_are_missing_or_added_are_named():
    assert [line.split(": ")[-1].split(",")[0] for line in compared(FAULTS, [*FAULTS[:1], *FAULTS[2:]])] == ["missing"]
    added = {**FAULTS[1], "phase": "at night"}
    assert [", at night, " in line and ": added, " in line for line in compared(FAULTS, [*FAULTS, added])] == [True]
    again = [*FAULTS, FAULTS[1]]
    assert len(compared(FAULTS, again)) == 1, "a row twice where it was once"


def test_of_random_faults_only_an_outcome_never_seen_differs():
    storm = [row for row in FAULTS[1:] if row["group"]]
    assert len({row["outcome"] for row in storm}) > 2
    ordinary = [row for row in FAULTS if not row.get("group")]
    assert compared(FAULTS, ordinary + storm[:20]) == []
    (line,) = compared(FAULTS, [*FAULTS, {**storm[0], "outcome": "silent mix"}])
    assert "silent mix" in line


def test_a_rank_of_an_architecture_counts():
    architectures = copy.deepcopy(ARCHITECTURES)
    name, entry = next((n, e) for n, e in architectures["architectures"].items() if e["runs"])
    run = next(iter(entry["runs"].values()))
    run["ranks"]["0"] = "failed"
    (line,) = compared(ARCHITECTURES, architectures)
    assert line.startswith(f"{name}, runs, ")


def test_the_command_exits_with_1_on_a_difference(tmp_path):
    new = copy.deepcopy(FAULTS)
    new[1]["outcome"] = "hang"
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, found in zip(paths, (FAULTS, new), strict=True):
        path.write_text(json.dumps(found))
    for other, status in ((paths[0], 0), (paths[1], 1)):
        command = [sys.executable, "-m", "benchmark.compare", str(paths[0]), str(other)]
        run = subprocess.run(command, cwd=results.REPOSITORY, capture_output=True, text=True, check=False)
        assert run.returncode == status, run.stderr
        assert run.stdout.endswith(f"{status} differences\n")


def test_other_json_is_refused():
    with pytest.raises(ValueError, match="neither"):
        outcomes({"some": "thing"})


def row(path, ratio, spread=0.1):
    return {"case": "dense", "path": path, "times_limit": ratio, "seconds_median": 1.0, "seconds_p95": 1 + spread}


def test_only_what_is_beyond_the_noise_of_both_runs_is_named():
    old = [row("ipc", 1.0), row("p2p", 2.0), row("gone", 1.0), row("auto", 1.0, 0.5), row("stock", 80.0)]
    new = [row("ipc", 1.3), row("p2p", 2.3), row("new", 9.0), row("auto", 1.5), row("stock", 109.0)]
    assert worse(old, new) == ["dense, ipc: 1.30 times the copy, 1.00 before; noise 20%"]
    assert worse(old, old) == worse(new, []) == []


def test_another_kind_of_host_is_named():
    here, there = ({"host": {"cpu": cpu, "cores": 2}} for cpu in ("AMD EPYC", "Intel Xeon"))
    assert other_host(here, here) == ""
    assert other_host(there, here) == "the earlier results are of 2 cores of Intel Xeon, these of 2 of AMD EPYC"
