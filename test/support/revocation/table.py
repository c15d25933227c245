"""Writes docs/results/revocation.md: the states of every story of an update that may be given up, and a soak.

PYTHONPATH=test .venv/bin/python -m support.revocation.table
"""

from __future__ import annotations

from pathlib import Path

from support.revocation.explore import explore
from support.revocation.model import Rules
from support.revocation.soak import soak

QUICK = [
    Rules(),
    Rules(staged=True),
    Rules(duplicates=1),
    Rules(refusals=1),
    Rules(timeouts=1),
    Rules(losses=1),
]
SWEPT = [
    Rules(losses=1, staged=True),
    Rules(losses=1, timeouts=1),
    Rules(losses=1, timeouts=1, staged=True),
    Rules(losses=1, duplicates=1),
    Rules(updates=2),
    Rules(updates=2, timeouts=1),
    Rules(updates=2, refusals=1),
    Rules(updates=2, duplicates=1),
    Rules(updates=2, duplicates=1, staged=True),
]
UPDATES, TRANSPORTS = 2000, ("auto", "p2p", "broadcast")
_PAGE = Path(__file__).parents[3] / "docs" / "results" / "revocation.md"


def named(rules: Rules) -> str:
    """Returns "2 updates, staged, 1 message twice"."""
    counted = {
        "message twice": rules.duplicates,
        "lost connection": rules.losses,
        "timeout": rules.timeouts,
        "refusal": rules.refusals,
    }
    words = [f"{rules.updates} update{'s' if rules.updates > 1 else ''}", *(["staged"] if rules.staged else [])]
    return ", ".join(words + [f"{number} {what}" for what, number in counted.items() if number])


def main() -> None:
    lines = [
        "# Updates that are given up",
        "",
        "Every state that a trainer, two engine ranks and their messages can be in, with the package's own control",
        "server between them: answers are lost at any moment, requests arrive late or twice, waits time out, and",
        "connections break and the server notices it late. No state breaks a promise: a trainer that was told that the",
        "old weights serve is right for ever, one that was told success finds the new weights on all engine ranks, no",
        "engine rank serves values of a training step, and none stays torn without the trainer knowing it.",
        "",
        "`PYTHONPATH=test .venv/bin/python -m support.revocation.table`",
        "",
        "| what happens | states | transitions | broken promises |",
        "|---|--:|--:|--:|",
    ]
    states = transitions = 0
    for rules in QUICK + SWEPT:
        found = explore(rules)
        states, transitions = states + found.states, transitions + found.transitions
        lines.append(f"| {named(rules)} | {found.states:,} | {found.transitions:,} | {int(bool(found.fault))} |")
        print(lines[-1], flush=True)
    lines.append(f"| together | {states:,} | {transitions:,} | |")
    lines += [
        "",
        f"{UPDATES:,} updates on real processes, two trainer ranks and two engine ranks, every third one staged. One in",
        "ten loses its answer, and the trainer overwrites its weights with NaN as soon as it was told an outcome. After",
        "each request engine ranks have exactly the values of the last update that succeeded, and of every update the",
        "trainer was told what all engine ranks have made of it.",
        "",
        "| transport | updates | new weights | old weights | torn, declared | told otherwise |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for transport in TRANSPORTS:
        told = soak(UPDATES, transport, deadline_s=3000)
        lines.append(f"| {transport} | {UPDATES:,} | {told['new']:,} | {told['old']} | {told['torn']} | 0 |")
        print(lines[-1], flush=True)
    _PAGE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
