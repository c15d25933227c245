"""The core knows no capability: which rooms import which, and which words stand in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sglang_reshard

PACKAGE = Path(sglang_reshard.__file__).parent
CORE = ("trainer", "engine", "protocol", "plan")

RULES = [
    ("engine", "routes.nixl"),
    ("engine", "routes.relay"),
    ("engine", "routes.delta"),
    ("engine", "routes.p2p"),
    ("engine", "routes.broadcast"),
    ("engine", "landings.shadow"),
    ("engine", "landings.converting"),
    ("engine", "landings.checked"),
    ("trainer", "routes.nixl"),
    ("trainer", "routes.relay"),
    ("trainer", "routes.delta"),
    ("trainer", "routes.p2p"),
    ("trainer", "landings.checked"),
    ("protocol", "routes"),
    ("protocol", "landings"),
    ("protocol", "trace"),
    ("protocol", "plan"),
    ("plan", "routes"),
    ("plan", "sources"),
    ("routes", "landings.shadow"),
    ("routes", "landings.converting"),
    ("routes", "landings.checked.target"),
    ("routes", "landings.checked.source"),
    ("routes", "landings.checked.messages"),
    ("routes.base", "routes.p2p"),
    ("routes.ipc", "routes.p2p"),
    ("routes.wire", "routes.p2p"),
    ("routes.wire", "routes.nixl"),
    ("routes.p2p", "routes.nixl"),
    ("routes.nixl", "routes.relay"),
    ("routes.p2p", "routes.delta"),
    ("trainer", "extras"),
    ("engine", "extras"),
    ("protocol", "extras"),
    ("plan", "extras"),
    ("routes", "extras"),
    ("landings", "extras"),
    ("api", "extras.snapshots"),
]


def imported(room: str) -> set[str]:
    """What the modules of a room import of the package, in functions and for type checks, too."""
    path = PACKAGE / room.replace(".", "/")
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("sglang_reshard.") for name in found if name.startswith("sglang_reshard.")}


@pytest.mark.parametrize(("room", "other"), RULES)
def test_a_room_knows_nothing_of_another(room: str, other: str) -> None:
    assert {name for name in imported(room) if name == other or name.startswith(f"{other}.")} == set()


def words(folders: tuple[str, ...], word: str) -> set[str]:
    files = (file for folder in folders for file in (PACKAGE / folder).rglob("*.py"))
    return {str(f.relative_to(PACKAGE)) for f in files if re.search(word, f.read_text(), re.IGNORECASE)}


@pytest.mark.parametrize(
    ("word", "where"),
    [
        ("nixl", {"trainer/options.py"}),  # a transport that users ask for
        ("delta", {"trainer/options.py", "trainer/coordinator.py"}),  # an option, and its place in a report
        ("relay", set()),
        ("shadow", {"protocol/messages.py", "trainer/options.py"}),  # what an option does
        ("arrivals", set()),
        ("checksum", {"protocol/messages.py", "trainer/options.py", "protocol/session.py", "engine/update.py"}),
        ("broadcastcommunicator", set()),
        ("p2pcommunicator", set()),
        ("send_request", set()),
    ],
)
def test_the_core_has_no_word_for_what_a_route_does(word: str, where: set[str]) -> None:
    assert words(CORE, word) == where


def test_every_room_is_there() -> None:
    rooms = {room for rule in RULES for room in rule}
    for room in rooms:
        path = PACKAGE / room.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), room
        assert imported(room), room
