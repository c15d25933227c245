"""What may happen to an update that is given up: the stories of which every state is visited, and the soaks."""

from __future__ import annotations

from support.revocation.model import Rules

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
SOAKED = {"auto": 2000, "p2p": 2000, "broadcast": 2000}  # transport -> updates


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
