"""The rows of results/verl.json as the table in RESHARDING_GUIDE.md.

python -m benchmark.verl.tables    # the table anew
"""

from __future__ import annotations

from typing import Any

from benchmark import marked, results

GUIDE = results.REPOSITORY / "RESHARDING_GUIDE.md"
PATH = results.FOLDER / "verl.json"
NAME = "verl"


def markdown(head: dict[str, Any], rows: results.Rows) -> str:
    host = head["host"]
    gpus = f"GPUs {', '.join(host['gpus'])}" if host["gpus"] else "no GPU"
    lines = [
        f"By `{head['command']}` on {host['cores']} cores ({host['cpu']}), {host['memory_gib']} GiB, {gpus}. Seconds "
        "are the median of a whole `CheckpointEngineManager.update_weights`.",
        "",
        "| case | tensors | MB | verl's own, s | reshard, s | times faster |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        own, ours = (next(r for r in rows if r["case"] == case and r["path"] == path) for path in ("verl", "reshard"))
        lines.append(
            f"| {case} | {own['tensors']:,} | {own['bytes'] / 1e6:,.0f} | {own['seconds_median']:.2f} | "
            f"{ours['seconds_median']:.3f} | {ours['times_faster']:.0f} |"
        )
    return "\n".join(lines)


def write_guide() -> None:
    marked.write(GUIDE, NAME, markdown(*results.load(PATH)))


if __name__ == "__main__":
    write_guide()
