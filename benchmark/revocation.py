"""Updates that are given up: every state of a model, and a soak of processes. `python -m benchmark.revocation`

The model and the soak are those of `test/support/revocation`, of which `test/unit` runs parts. Minutes on two cores.
"""

from __future__ import annotations

import os

from benchmark import pages, results
from benchmark.world import find_tests


def main() -> None:
    folder = str(results.REPOSITORY / "test")
    find_tests()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))  # of the soak's
    from support.revocation.explore import explore
    from support.revocation.soak import soak
    from support.revocation.stories import QUICK, SOAKED, SWEPT, named

    rows: results.Rows = []
    for rules in QUICK + SWEPT:
        found = explore(rules)
        states = {"states": found.states, "transitions": found.transitions, "fault": found.fault}
        rows.append({"kind": "model", "story": named(rules), **states})
        print(rows[-1], flush=True)
    for transport, updates in SOAKED.items():
        rows.append({"kind": "soak", "transport": transport, "updates": updates, **soak(updates, transport, 0, 3000.0)})
        print(rows[-1], flush=True)
    pages.publish("revocation", "python -m benchmark.revocation", rows)


if __name__ == "__main__":
    main()
