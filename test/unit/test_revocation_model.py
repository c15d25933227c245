"""Every state of an update that may be given up: what the trainer was told of it is true."""

import pytest

from support.revocation.explore import explore
from support.revocation.model import Rules
from support.revocation.stories import QUICK, SWEPT, named


@pytest.mark.parametrize("rules", QUICK, ids=named)
def test_no_state_breaks_a_promise(rules):
    found = explore(rules)
    assert not found.fault, "\n".join((found.fault, *found.trace))
    assert found.states > 400


@pytest.mark.sweep
@pytest.mark.parametrize("rules", SWEPT, ids=named)
def test_no_state_of_longer_stories_breaks_a_promise(rules):
    found = explore(rules)
    assert not found.fault, "\n".join((found.fault, *found.trace))


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        (Rules(revokes=False), "which the trainer was told is dead"),
        (Rules(marks=False), "which the trainer was told is dead"),
        (Rules(losses=1, settles=False), "stay torn"),
        (Rules(updates=2, duplicates=1, ends=False, within=False), "which the trainer was told is dead"),
    ],
    ids=["gives up without revoking", "writes without a mark", "asks without ending its vote", "enters what has ended"],
)
def test_a_protocol_without_one_of_its_rules_is_found_out(rules, fault):
    assert fault in explore(rules).fault
