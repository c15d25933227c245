"""Writes the tables of README.md and docs/results from the JSON files in benchmark/results.

python -m benchmark.pages [NAME ...]    # all of them, or those named

Each table stands between two comments of its document, so that people can write around it (`marked`). The table of
architectures is written by `test/engine/architectures/architecture_results.py`, which knows its runs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmark import marked, results, tables

Head = results.Head


class Table(NamedTuple):
    """A table of a document: where it stands, and the Markdown that a file of results makes.

    writer  writes the file, where it may be missing
    """

    document: str
    source: Path
    markdown: Callable[[Path], str]
    writer: str = ""

    def text(self) -> str:
        if self.writer and not self.source.exists():
            return f"No run is recorded: {self.writer} writes benchmark/results/{self.source.name}."
        return self.markdown(self.source)


def digest(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}. `x copy` is the time relative to a plain copy of the same bytes in the same run.",
        "",
        "| weights | side | reads | bytes read, MB | seconds | ns per element | x copy |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['case']} | {r['side']} | {r['selection']} | {r['bytes'] / 1e6:,.0f} | {r['seconds']:.4f} | "
        f"{r['ns_per_element']:.2f} | {r['times_copy']:.2f} |"
        for r in rows
        if "times_copy" in r
    ]
    return "\n".join(lines)


def mesh_to_mesh(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}: {rows[0]['tensors']} matrices of bfloat16, {rows[0]['bytes'] / 1e6:,.0f} MB, on "
        f"4 ranks over gloo. Seconds are the median of {rows[0]['moves']} moves, each that of the slowest rank. "
        f"{' '.join(head['notes'])}",
        "",
        "| layouts | way | move, s | times reshard | plan, s | received by a rank, MB | buffers, MB | bit-exact |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        ours = next(o for o in rows if o["case"] == r["case"] and o["way"] == "reshard")
        cells = [r["case"], r["way"], f"{r['seconds_median']:.3f}"]
        cells.append(f"{r['seconds_median'] / ours['seconds_median']:.1f}")
        cells.append("" if r["plan_seconds"] is None else f"{r['plan_seconds']:.2f}")
        cells += ["" if r[n] is None else f"{r[n] / 1e6:.1f}" for n in ("received_bytes", "extra_bytes")]
        lines.append("| " + " | ".join([*cells, "yes" if r["bit_exact"] else "NO"]) + " |")
    return "\n".join(lines)


def quantization(path: Path) -> str:
    head, rows = results.load(path)
    lines = [f"{_measured_by(head, path)}.", "", "| method | dense | experts | why not |", "|---|---|---|---|"]
    by_case: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["model"]] = row
    for case, of in by_case.items():
        method, _, kind = case.partition(", ")
        whys = dict.fromkeys(_shortened(row["why"]) for row in of.values() if row["why"])
        cells = [f"`{method}`{', ' * bool(kind)}{kind}", of["dense"]["outcome"], of["experts"]["outcome"]]
        lines.append("| " + " | ".join([*cells, "; ".join(whys)]) + " |")
    return "\n".join(lines)


def _shortened(why: str) -> str:
    """Returns the first part of an error, without its advice."""
    wrong = re.split(r"[.;] (?:Compare|Send|Start) | \(sglang/", why)[0]
    return wrong.replace("|", "\\|")


def async_updates(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}; from FSDP over 4 trainer ranks to 4 engine ranks.",
        "",
        "| model | tensors | MB | transport | copy, ms | `update_async`, ms | ratio | `update`, ms "
        "| a trainer rank's copy, MB | bit-exact |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        cells = [r["model"], f"{r['tensors']:,}", f"{r['bytes'] / 1e6:,.0f}", f"`{r['transport']}`"]
        cells += [f"{r['copy_seconds'] * 1e3:.1f}", f"{r['stall_seconds'] * 1e3:.1f}"]
        cells += [f"{r['stall_seconds'] / r['copy_seconds']:.2f}", f"{r['update_seconds'] * 1e3:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{r['shadow_bytes'] / 1e6:.1f}", _yes(r["bit_exact"])]) + " |")
    return "\n".join(lines)


def cache_versions(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}; one engine rank, conversations of several turns, an update every few seconds.",
        "",
        "| way | updates | turns per minute | tokens read from the cache when a turn begins "
        "| tokens computed in prefills, per turn | paused for an update, ms | says what a cold engine says |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        cells = [r["way"], str(r["updates"]), f"{r['turns'] / r['seconds'] * 60:.0f}"]
        cells += [f"{r['cached_tokens'] / r['prompt_tokens']:.0%}", f"{r['computed_tokens'] / r['turns']:.0f}"]
        lines.append("| " + " | ".join([*cells, f"{r['pause_seconds'] * 1e3:.0f}", _yes(r["cold"])]) + " |")
    return "\n".join(lines)


def snapshot_loads(path: Path) -> str:
    head, rows = results.load(path)
    size = f"a snapshot of {rows[0]['nbytes'] / 1e6:,.0f} MB in bfloat16"
    lines = [
        f"{_measured_by(head, path)}; {size}, median (shortest to longest).",
        "",
        "| TP | way | from | seconds | MB that a rank reads by calls | of the snapshot "
        "| MB from the disk for a rank | for all |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        cells = [str(r["tp"]), r["way"], "disk" if r["cold"] else "page cache"]
        cells += [f"{r['seconds']:.2f} ({r['shortest']:.2f} to {r['longest']:.2f})"]
        by_calls = r["way"] != "SGLang"
        cells += (
            [f"{r['call_bytes'] / 1e6:,.0f}", f"{r['call_bytes'] / r['nbytes']:.2f}"] if by_calls else ["maps all", ""]
        )
        cells += [f"{r[column] / 1e6:,.0f}" if r["cold"] else "0" for column in ("read_bytes", "disk_bytes")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def profile(path: Path) -> str:
    head, rows = results.load(path)
    return f"{_measured_by(head, path)}.\n\n{profile_lines(rows)}"


def profile_lines(rows: results.Rows) -> str:
    lines = [
        "| case | side | step | calls | warm, ms | of that CPU, ms | first update, ms |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        figures = " | ".join(f"{r[key] * 1e3:.2f}" for key in ("warm_seconds", "warm_cpu_seconds", "first_seconds"))
        lines.append(f"| {r['case']} | {r['side']} | {r['step']} | {r['calls']:g} | {figures} |")
    return "\n".join(lines)


def p2p_rate(path: Path) -> str:
    head, rows = results.load(path)
    return f"{_measured_by(head, path)}.\n\n{p2p_rate_lines(rows)}"


def p2p_rate_lines(rows: results.Rows) -> str:
    lines = [
        "| case | tensors | MB | links | update moves, ms | message, ms | two copies, ms | message / update |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        cells = [r["case"], f"{r['tensors']:,}", f"{r['bytes'] / 1e6:,.0f}", str(r["links"])]
        cells += [f"{r[key] * 1e3:.1f}" for key in ("update_seconds", "message_seconds", "copy_seconds")]
        lines.append("| " + " | ".join([*cells, f"{r['ratio']:.2f}"]) + " |")
    return "\n".join(lines)


def parameter_stream(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}; gloo, and two engine ranks.",
        "",
        "| model | tensors | MB | way | broadcasts | until all have arrived, s | the update then, s | bit-exact |",
        "|---|---:|---:|---|---:|---:|---:|---|",
    ]
    for r in rows:
        cells = [r["model"], f"{r['tensors']:,}", f"{r['bytes'] / 1e6:,.0f}", r["way"], f"{r['broadcasts']:,}"]
        cells += [f"{r['stream_seconds']:.3f}", f"{r['commit_seconds']:.3f}", _yes(r["bit_exact"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def deltas(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}.",
        "",
        "| run | learning rate | steps | elements of bfloat16 that change in a step, median | most |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        if "run" in r:
            shares = f"{r['changed_median']:.2%} | {r['changed_max']:.2%}"
            lines.append(f"| {r['run']} | {r['learning_rate']:g} | {r['steps']} | {shares} |")
    lines += [
        "",
        "| link | receivers | transport | learning rate | changed | received by one, MB | update, s "
        "| times as fast as a full one | publish, s | compare, s | move, s | bit-exact |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    links = [r for r in rows if "receivers" in r]
    for r in links:
        full = next(
            o["seconds"]
            for o in links
            if o["delta"] == "off" and all(o[key] == r[key] for key in ("rate", "receivers", "transport"))
        )
        changed = "all sent" if r["changed"] is None else f"{r['changed']:.2%}"
        name = f"`{r['transport']}`" + (", `relay`" if r["relay"] else "")
        cells = [r["rate"], str(r["receivers"]), name, f"{r['learning_rate']:g}", changed]
        cells += [f"{r['received_bytes'] / 1e6:.1f}", f"{r['seconds']:.2f}", f"{full / r['seconds']:.1f}"]
        cells += [f"{r[f'{phase}_seconds']:.2f}" for phase in ("publish", "compare", "move")]
        lines.append("| " + " | ".join([*cells, _yes(r["bit_exact"])]) + " |")
    lines += [
        "",
        "| link | transport | `delta` | a training step, s | the same during an update, s | slower by | steps |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        if "meanwhile_seconds" in r:
            slower = r["meanwhile_seconds"] / r["step_seconds"] - 1
            cells = [r["rate"], f"`{r['transport']}`", f"`{r['delta']}`", f"{r['step_seconds']:.2f}"]
            cells += [f"{r['meanwhile_seconds']:.2f}", f"{slower:.1%}", str(r["steps_meanwhile"])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def block_fp8(path: Path) -> str:
    head, rows = results.load(path)
    verl = next(r["seconds_median"] for r in rows if r["way"] == "verl")
    lines = [
        f"{_measured_by(head, path)}: {rows[0]['tensors']} matrices, {rows[0]['bytes'] / 1e6:,.0f} MB in bfloat16, "
        "from FSDP over 4 trainer ranks to 2 engine ranks.",
        "",
        "| way | seconds | verl's / this | first update, s | engine rank's extra memory, MB | bit-exact with verl's |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        extra = "" if r["peak_extra_bytes"] is None else f"{r['peak_extra_bytes'] / 1e6:,.0f}"
        cells = [r["way"], f"{r['seconds_median']:.3f}", f"{verl / r['seconds_median']:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{r['first_seconds']:.3f}", extra, _yes(r["bit_exact"])]) + " |")
    return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def hosts(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}: {rows[0]['model_bytes'] / 1e6:,.0f} MB in bfloat16. {' '.join(head['notes'])} "
        f"Seconds are the median of {rows[0]['updates']} updates; `share` is relative to one TCP connection there.",
        "",
        "| trainer hosts | receivers | transport | update, s | times one receiver | sent by a trainer host, MB "
        "| share | bit-exact |",
        "|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        one = next(o for o in rows if (o["trainers"], o["receivers"], o["transport"]) == (1, 1, r["transport"]))
        way = f"`{r['transport']}`" + (", relay" if r["relay"] else "")
        cells = [str(r["trainers"]), str(r["receivers"]), way, f"{r['seconds_median']:.2f}"]
        cells.append(f"{r['seconds_median'] / one['seconds_median']:.2f}")
        cells += [f"{r['sent_bytes'] / 1e6:,.0f}", f"{r['share_of_link']:.2f}", "yes" if r["bit_exact"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def control(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}. {' '.join(head['notes'])} Medians and maxima of 8 updates.",
        "",
        "| trainer ranks | engines | engine ranks | `verify` | update, s | slowest, s | server's CPU, s | messages "
        "| server's memory, bytes a rank |",
        "|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        cells = [f"{r['trainer_ranks']:,}", str(r["engines"]), str(r["engines"] * r["engine_ranks"])]
        cells.append("full" if r["verify"] else "off")
        cells += [f"{r[name]:.3f}" for name in ("seconds_median", "seconds_max", "server_cpu_seconds")]
        cells += [f"{r[name]:,}" for name in ("messages", "server_bytes_a_rank")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def control_transports(path: Path) -> str:
    head, rows = results.load(path)
    of_all = rows[0]
    lines = [
        f"{_measured_by(head, path)}. {' '.join(head['notes'])} {of_all['updates']} updates each, in turns, of "
        f"{of_all['messages']} messages with {of_all['request_bytes']:,} bytes of requests.",
        "",
        "| connections | update, ms: median | a tenth below | a tenth above |",
        "|---|---:|---:|---:|",
    ]
    for r in rows:
        cells = [f"{r[f'seconds_{name}'] * 1e3:.2f}" for name in ("median", "p10", "p90")]
        lines.append("| " + " | ".join([r["transport"], *cells]) + " |")
    return "\n".join(lines)


def trainers(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}. `received / least` is of the update that received most.",
        "",
        "| trainer | what is passed | transport | | received / least |",
        "|---|---|---|---|---:|",
    ]
    for row in {tuple(v for k, v in row.items() if k != "test"): row for row in rows}.values():
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        transport = f"`{row['transport']}`" if row["transport"] != "any" else "any"
        lines.append(f"| {row['trainer']} | {row['way']} | {transport} | {row['state']} | {ratio} |")
    return "\n".join(lines)


def dtensors(path: Path) -> str:
    """A row for each family of DTensors and version of torch, over all meshes."""
    head, rows = results.load(path)
    counted = ("cases", "torch", "same", "refused", "wrong")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        total = found.setdefault((row["family"], row["torch_version"]), {"meshes": [], **dict.fromkeys(counted, 0)})
        total["meshes"].append(row["mesh"])
        for name in counted:
            total[name] += row[name]
    lines = [
        f"{_measured_by(head, path)}.",
        "",
        "| DTensors | torch | meshes | cases | `full_tensor` is the whole | read as the whole | refused | wrong |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for (family, version), total in sorted(found.items()):
        cells = [family, version, ", ".join(total["meshes"]), *(f"{total[name]:,}" for name in counted)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def revocation(path: Path) -> str:
    head, rows = results.load(path)
    model = [row for row in rows if row["kind"] == "model"]
    lines = [f"{_measured_by(head, path)}.", "", "| what may happen | states | transitions | broken promises |"]
    lines.append("|---|---:|---:|---:|")
    lines += [
        f"| {row['story']} | {row['states']:,} | {row['transitions']:,} | {int(row['fault'] != '')} |" for row in model
    ]
    states, transitions = (sum(row[name] for row in model) for name in ("states", "transitions"))
    lines += [f"| together | {states:,} | {transitions:,} | {sum(row['fault'] != '' for row in model)} |", ""]
    lines += ["| transport | updates | new weights | old weights | torn, declared |", "|---|---:|---:|---:|---:|"]
    for row in rows:
        if row["kind"] == "soak":
            told = " | ".join(f"{row.get(outcome, 0):,}" for outcome in ("new", "old", "torn"))
            lines.append(f"| `{row['transport']}` | {row['updates']:,} | {told} |")
    return "\n".join(lines)


def faults(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}: {len(rows)} rows, summed by fault.",
        "",
        "| fault | tried | in or at | state of the engine afterwards | noticed within, s |",
        "|---|---:|---|---|---:|",
    ]
    for fault in dict.fromkeys(map(_fault, rows)):
        of = [row for row in rows if _fault(row) == fault]
        seconds = [row["detect_s"] for row in of if row["detect_s"] is not None]
        lines.append(
            f"| {fault} | {len(of)} | {'any' if of[0]['group'] else _distinct(of, 'phase')} | "
            f"{_distinct(of, 'outcome')} | {f'{max(seconds):.2f}' if seconds else ''} |"
        )
    return "\n".join(lines)


def fuzz(path: Path) -> str:
    head, rows = results.load(path)
    cases, seconds = sum(row["cases"] for row in rows), sum(row["seconds"] for row in rows)
    failed = [row["test"] for row in rows if row["outcome"] != "passed"]
    outcome = f"{len(failed)} tests failed: {', '.join(failed)}" if failed else "no test failed"
    lines = [
        f"{_measured_by(head, path)}: {cases:,} cases in {len(rows)} tests, {seconds:,.0f} s of cases; {outcome}.",
        "",
        "| test | cases | seconds | outcome |",
        "|---|---:|---:|---|",
    ]
    lines += [f"| `{r['test']}` | {r['cases']:,} | {r['seconds']:,.0f} | {r['outcome']} |" for r in rows]
    return "\n".join(lines)


def fuzz_deltas(path: Path) -> str:
    head, rows = results.load(path)
    cases, failed = sum(row["cases"] for row in rows), sum(len(row["failures"]) for row in rows)
    outcome = f"{failed} processes failed" if failed else "nothing was written out of place, and no process failed"
    lines = [
        f"{_measured_by(head, path)}: {cases:,} damaged deltas; {outcome}.",
        "",
        "| damaged | cases | refused | applied as the format says | seconds |",
        "|---|---:|---:|---:|---:|",
    ]
    names = {"section": "what a trainer rank sends an engine rank", "file": "a file that a follower of snapshots reads"}
    lines += [
        f"| {names[r['kind']]} | {r['cases']:,} | {r['refused']:,} | {r['applied']:,} | {r['seconds']:,.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


def delta_checks(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}: a message of {rows[0]['mib']} MiB of bfloat16, one thread.",
        "",
        "| changed | sent as | index, bytes | checked, ms | applied, ms | check / apply | copy of the message, ms |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        check, applied, copied = (r[f"{what}_seconds"] * 1e3 for what in ("check", "apply", "copy"))
        lines.append(
            f"| {r['changed_share']:.1%} | {r['kind'].lower()} | {r['index_bytes']:,} | {check:.2f} | {applied:.2f} | "
            f"{check / applied:.2f} | {copied:.2f} |"
        )
    return "\n".join(lines)


def soak(path: Path) -> str:
    head, rows = results.load(path)
    summary = next(row for row in rows if row["row"] == "summary")
    lines = [
        f"{_measured_by(head, path)}: {summary['updates']:,} updates of a TP=2 server in {summary['seconds']:,.0f} s "
        f"(median {summary['update_seconds_median']:.3f} s, including the wait for running requests), while clients "
        f"sent {summary['requests']:,} requests.",
        "",
        f"- {summary['failures']} requests failed; {summary['wrong_version']} answers came from a version that was not "
        "live.",
        f"- {summary['versions_verified']} versions were verified: by `verify`, by a stock load, and by transformers' "
        "tokens.",
        "",
        "Memory held in the last tenth of the updates, relative to the second tenth:",
        "",
        "| process | ratio |",
        "|---|---:|",
    ]
    lines += [f"| {row['process']} | {row['held_ratio']:.4f} |" for row in rows if row["row"] == "process"]
    return "\n".join(lines)


def verl(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}. Seconds are the median of a whole `CheckpointEngineManager.update_weights`.",
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


def planning(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}.",
        "",
        "| case | tensors | shards | boxes copied | bytes of the model, GB | seconds | peak memory, GB | strategy |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {r['case']} | {r['tensors']:,} | {r['pieces']:,} | {r['boxes']:,} | {r['bytes'] / 1e9:,.1f} | "
        f"{r['seconds']:.2f} | {r['peak_bytes'] / 1e9:.2f} | `{r['transport']}` |"
        for r in rows
    ]
    return "\n".join(lines)


def opens(path: Path) -> str:
    head, rows = results.load(path)
    lines = [
        f"Counted by `{head['command']}` ([{path.name}](../../benchmark/results/{path.name})), without a GPU.",
        "",
        "| loader | tensors | trainer ranks that are read | their allocations | opened |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['case']} | {r['tensors']:,} | {r['trainer_ranks']} | {r['allocations']:,} | {r['opened']:,} |"
        for r in rows
    ]
    return "\n".join(lines)


def demo(path: Path) -> str:
    """A row for each of the demo's updates; the most of all engine ranks."""
    found = json.loads(path.read_text())
    lines = [
        f"Measured by `make demo | tail -n 1 > benchmark/results/{path.name}` on {_machine(found['host'])}: "
        f"{found['source_tp']} trainer ranks with float32 shards, {found['target_tp']} engine ranks.",
        "",
        "| engine dtype | update | total, s | trace | plan | connect | move | received by an engine rank, MB | least "
        "possible, MB | held by its trainer rank, MB | peak extra memory, MB | tokens equal | bit-exact |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for update in found["updates"]:
        ranks, seconds = update["engine_ranks"], update["seconds"]
        most = [max(r[n] for r in ranks) / 1e6 for n in ("received_bytes", "least_bytes", "peak_extra_bytes")]
        held = max(r["shard_bytes"] for r in update["trainer_ranks"]) / 1e6
        cells = [update["dtype"], update["weight_version"], f"{seconds['total']:.3f}"]
        cells += [f"{seconds[p]:.3f}" if p in seconds else "" for p in ("trace", "plan", "connect", "move")]
        cells += [f"{most[0]:.1f}", f"{most[1]:.1f}", f"{held:.1f}", f"{most[2]:.2f}"]
        cells += ["yes" if update[proof] else "NO" for proof in ("tokens_equal", "bit_exact")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_all(path: Path) -> str:
    """Counts, minutes by folder, and the slowest tests of the last `make test-all`."""
    head, rows = results.load(path)
    lines = [
        f"{_measured_by(head, path)}, commit {head['commit']}: {head['passed']:,} passed, {head['failed']:,} failed, "
        f"{head['skipped']:,} skipped in {head['minutes']:.0f} minutes.",
        "",
        "| folder | minutes |",
        "|---|---:|",
        *(f"| `{folder}` | {minutes:.1f} |" for folder, minutes in head["minutes_by_folder"].items()),
        "",
        "| slowest tests | seconds |",
        "|---|---:|",
        *(f"| `{row['test'].replace('|', '')}` | {row['seconds']:.1f} |" for row in rows),
    ]
    return "\n".join(lines)


def matrix(path: Path) -> str:
    """A row for each environment and release that was tried, and its day."""
    head, rows = results.load(path)
    lines = [
        f"`{head['command']}` ([{path.name}](../benchmark/results/{path.name}), {_machine(head['host'])}) writes a row "
        f"for each test that passed. {len(rows)} did, in {sum(r['seconds'] for r in rows) / 60:.0f} minutes without "
        f"installations. GB are the files of an environment. {' '.join(head['notes'])}".rstrip(),
        "",
        "| | Python | torch | SGLang | what was run | seconds | GB | on |",
        "|---|---|---|---|---|---:|---:|---|",
    ]
    for r in rows:
        cells = [r["kind"], r["python"], r["torch"], r["sglang"] or "-", r["says"], f"{r['seconds']:.0f}"]
        cells += [f"{r['gigabytes']:.1f}" if r["gigabytes"] else "-", r["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu(path: Path) -> str:
    """A row for each item of the battery; the file has all figures."""
    head, rows = results.load(path)
    host = head["host"]
    lines = [
        f"{_measured_by(head, path)}, {host['gpu_memory_gib']} GiB, driver {host['driver']}, torch {host['torch']}, "
        f"NCCL {host['nccl']}, copies by {host['copies']}, commit {head['commit']}: {head['verdict']}.",
        "",
        "| item | | expected | verdict | s |",
        "|---:|---|---|---|---:|",
    ]
    for row in rows:
        verdict = f"{row['verdict']}: {row['why']}" if row["why"] else row["verdict"]
        cells = [str(row["number"]), row["name"], row["expected"], verdict, f"{row['seconds']:.1f}"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join([*lines, *_gpu_replays(rows), *_gpu_copies(rows), *_gpu_checksums(rows)])


def _gpu_replays(rows: results.Rows) -> list[str]:
    """Recorded loaders, compared with one copy of as many bytes."""
    lines = [
        "",
        "| loader, read from another process's memory | GB | reads | launches | ms | of one copy | TB/s, both ways |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "program" in (seen := row["seen"]):
            cells = [seen["program"], f"{seen['bytes'] / 1e9:.2f}", f"{seen['reads']:,}", str(seen["launches"])]
            cells += [f"{seen['seconds'] * 1e3:.2f}", f"{seen['ratio']:.2f}", f"{seen['tb_per_s_both_ways']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def _gpu_copies(rows: results.Rows) -> list[str]:
    """Lists of copies as this package runs them and as torch does, relative to one copy of as many bytes."""
    lines = [
        "",
        "| copies of 96 x 2,048 elements of bfloat16 | one copy of the bytes, ms | this package "
        "| `torch._foreach_copy_` | `copy_`, one by one | CUDA graph of `_foreach_copy_` |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        for name, seen in row["seen"].items():
            if isinstance(seen, dict) and "launches" in seen:
                count, shape = name.split("_")
                cells = [f"{int(count):,} {shape}", f"{seen['one_copy'] * 1e3:.2f}"]
                cells += [
                    f"{seen[way] / seen['one_copy']:.2f}" if way in seen else ""
                    for way in ("ours", "foreach", "one_by_one", "graph")
                ]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def _gpu_checksums(rows: results.Rows) -> list[str]:
    """Checksums of all elements and of a sample, relative to one copy of as many bytes; none before they were timed."""
    lines = [
        "",
        "| checksums of | GB | one copy of the bytes, ms | of all elements | GB/s | of one in 64 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        for name, seen in row["seen"].items():
            if isinstance(seen, dict) and "sample" in seen:
                rate = seen["bytes"] / seen["ours"] / 1e9
                cells = [name, f"{seen['bytes'] / 1e9:.2f}", f"{seen['one_copy'] * 1e3:.2f}"]
                cells += [f"{seen['ours'] / seen['one_copy']:.2f}", f"{rate:,.0f}"]
                cells += [f"{seen['sample'] / seen['one_copy']:.2f}"]
                lines.append("| " + " | ".join(cells) + " |")
    return lines if len(lines) > 3 else []


def one_gpu(path: Path) -> str:
    head, rows = results.load(path)
    versions = head["versions"]
    lines = [
        f"{_measured_by(head, path)}, sglang {versions['sglang']}, torch {versions['torch']}, commit {head['commit']}. "
        + " ".join(f"{note[0].upper()}{note[1:]}." for note in head["notes"]),
        "",
        "| case | step | ms | | right |",
        "|---|---|---:|---|---|",
    ]
    for row in rows:
        figures = {k: v for k, v in row.items() if k not in ("case", "step", "right", "seconds")}
        if "phases" in figures:
            figures["phases"] = {f"{name}_ms": round(s * 1e3, 2) for name, s in figures["phases"].items()}
        took = f"{row['seconds'] * 1e3:,.1f}" if "seconds" in row else ""
        lines.append("| " + " | ".join([row["case"], row["step"], took, _figures(figures), _yes(row["right"])]) + " |")
    return "\n".join(lines)


def _figures(seen: dict[str, Any]) -> str:
    """Returns figures as "name value", nested ones in parentheses."""
    parts = []
    for name, value in seen.items():
        text = f"({_figures(value)})" if isinstance(value, dict) else _figure(value)
        parts.append(f"{name.replace('_', ' ')} {text}")
    return "; ".join(parts)


def _figure(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_figure, value[:4])) + (", ..." if len(value) > 4 else "") or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


TABLES: dict[str, Table] = {
    "costs": Table("README.md", results.BENCH, lambda path: tables.costs(*results.load(path))),
    "benchmark": Table("docs/results/benchmark.md", results.BENCH, lambda path: tables.markdown(*results.load(path))),
    "demo": Table("docs/results/demo.md", results.FOLDER / "demo.json", demo),
    "planning": Table("docs/results/planning.md", results.PLANNING, planning),
    "opens": Table("docs/results/opens.md", results.OPENS, opens),
    "digest": Table("docs/results/digest.md", results.FOLDER / "digest.json", digest),
    "mesh-to-mesh": Table("docs/results/mesh-to-mesh.md", results.FOLDER / "mesh_to_mesh.json", mesh_to_mesh),
    "async-updates": Table("docs/results/async-updates.md", results.FOLDER / "async-updates.json", async_updates),
    "cache-versions": Table("docs/results/cache-versions.md", results.FOLDER / "cache-versions.json", cache_versions),
    "snapshot-loads": Table("docs/results/snapshot-loads.md", results.FOLDER / "snapshot-loads.json", snapshot_loads),
    "deltas": Table("docs/results/deltas.md", results.FOLDER / "deltas.json", deltas),
    "parameter-stream": Table(
        "docs/results/parameter-stream.md", results.FOLDER / "parameter-stream.json", parameter_stream
    ),
    "profile": Table("docs/results/profile.md", results.FOLDER / "profile.json", profile),
    "p2p-rate": Table("docs/results/p2p-rate.md", results.FOLDER / "p2p-rate.json", p2p_rate),
    "block-fp8": Table("docs/results/block-fp8.md", results.FOLDER / "block-fp8.json", block_fp8),
    "quantization": Table("docs/results/quantization.md", results.FOLDER / "quantization.json", quantization),
    "control": Table("docs/results/control.md", results.FOLDER / "control.json", control),
    "control-transports": Table(
        "docs/results/control.md", results.FOLDER / "control_transports.json", control_transports
    ),
    "hosts": Table("docs/results/hosts.md", results.FOLDER / "hosts.json", hosts),
    "verl": Table("docs/results/verl.md", results.FOLDER / "verl.json", verl),
    "trainers": Table("docs/results/trainers.md", results.FOLDER / "trainers.json", trainers),
    "dtensors": Table("docs/results/dtensors.md", results.FOLDER / "dtensors.json", dtensors),
    "revocation": Table("docs/results/revocation.md", results.FOLDER / "revocation.json", revocation),
    "faults": Table("docs/results/faults.md", results.FOLDER / "faults.json", faults),
    "fuzz": Table("docs/results/fuzz.md", results.FOLDER / "fuzz.json", fuzz),
    "fuzz-http": Table("docs/results/fuzz.md", results.FOLDER / "fuzz-http.json", fuzz),
    "folders": Table("docs/results/folders.md", results.FOLDER / "folders.json", fuzz),
    "fuzz-deltas": Table("docs/results/fuzz.md", results.FOLDER / "fuzz-deltas.json", fuzz_deltas),
    "delta-checks": Table("docs/results/deltas.md", results.FOLDER / "delta-checks.json", delta_checks),
    "gpu": Table("docs/results/gpu.md", results.FOLDER / "gpu.json", gpu, "`make test-gpu` on a host with a GPU"),
    "gpu-h100": Table("docs/results/gpu.md", results.FOLDER / "gpu-h100.json", gpu, "the same, on another GPU"),
    "one-gpu": Table("docs/results/one-gpu.md", results.FOLDER / "one-gpu.json", one_gpu, "`make bench-one-gpu`"),
    "soak": Table("docs/results/soak.md", results.FOLDER / "soak.json", soak),
    "matrix": Table("docs/compatibility.md", results.FOLDER / "matrix.json", matrix, "`make test-matrix`"),
    "test-all": Table("docs/results/test-all.md", results.FOLDER / "test-all.json", test_all, "`make test-all`"),
}


def write(*names: str) -> None:
    """Writes the tables of these names, or all of them, into their documents."""
    for name in names or TABLES:
        table = TABLES[name]
        marked.write(results.REPOSITORY / table.document, name, table.text())


def written(name: str) -> str:
    """Returns the table as its document has it."""
    return marked.read(results.REPOSITORY / TABLES[name].document, name)


def _measured_by(head: Head, path: Path) -> str:
    link = f"[{path.name}](../../benchmark/results/{path.name})"
    return f"Measured by `{head['command']}` ({link}) on {_machine(head['host'])}, {head['date']}"


def _machine(host: dict[str, Any]) -> str:
    gpus = f"GPUs {', '.join(host['gpus'])}" if host.get("gpus") else "no GPU"
    cores = f"{host['cores']} core{'s' if host['cores'] > 1 else ''}"
    return f"{cores} ({host['cpu']}), {host['memory_gib']} GiB, {gpus}"


def _fault(row: dict[str, Any]) -> str:
    return str(row["group"] or row["fault"])


def _distinct(rows: results.Rows, column: str) -> str:
    return ", ".join(dict.fromkeys(row[column] for row in rows if row[column]))


if __name__ == "__main__":
    write(*sys.argv[1:])
