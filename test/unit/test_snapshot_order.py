"""A follower never puts a server back: what it holds and what a folder has are ordered by their publications."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang_reshard.errors import EngineRefused, EngineUnreachable
from sglang_reshard.extras.snapshots.folders import LocalFolder, listed
from sglang_reshard.extras.snapshots.follower import SnapshotFollower
from sglang_reshard.protocol.publication import next_publication
from support.following import Server
from support.snapshot_writer import write


def publication(folder: Path, name: str) -> int:
    found = listed(LocalFolder(folder))
    assert found is not None
    return dict(zip(found.names, found.publications, strict=True))[name]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def follower(tmp_path: Path, server: Server) -> SnapshotFollower:
    """Its server has the only snapshot, step-1."""
    write(tmp_path, 1)
    found = SnapshotFollower(tmp_path, server)
    assert found.poll() == "step-1"
    return found


@pytest.mark.parametrize("again", [False, True], ids=["the same follower", "a new one"])
def test_a_direct_update_is_not_undone(
    tmp_path: Path, server: Server, follower: SnapshotFollower, told: Any, again: bool
) -> None:
    server.version, server.publication = "step-5", next_publication()  # as an update by the trainer
    if again:
        follower = SnapshotFollower(tmp_path, server)
    for _ in range(3):
        assert follower.poll() is None
    assert server.version == "step-5"
    said = [record.getMessage() for record in told.records]
    assert len(said) == 1, "it is told once"
    assert "holds version 'step-5', which is not older than snapshot 'step-1'" in said[0]
    write(tmp_path, 6)
    assert follower.poll() == "step-6"


def test_going_back_is_allowed_where_that_is_asked_for(tmp_path: Path, server: Server) -> None:
    write(tmp_path, 4)
    server.version, server.publication = "step-5", next_publication()
    follower = SnapshotFollower(tmp_path, server, allow_rollback=True)
    assert follower.poll() == "step-4"
    assert server.publication == publication(tmp_path, "step-4")
    assert follower.poll() is None, "it has that one"


def test_weights_of_the_users_own_request_stay_until_a_later_snapshot(
    tmp_path: Path, server: Server, follower: SnapshotFollower
) -> None:
    server.version = "by hand"
    assert follower.poll() is None
    write(tmp_path, 2)
    assert follower.poll() == "step-2"


def test_a_server_that_was_started_again_gets_the_newest_again(server: Server, follower: SnapshotFollower) -> None:
    server.version, server.publication = "default", 0
    assert follower.poll() == "step-1"


def test_torn_weights_are_made_good_by_the_snapshot_that_the_server_had(
    server: Server, follower: SnapshotFollower
) -> None:
    server.torn = "half of update 8"
    assert follower.poll() == "step-1"
    assert not server.torn


def test_a_damaged_newest_snapshot_does_not_put_the_server_back(
    tmp_path: Path, server: Server, follower: SnapshotFollower
) -> None:
    write(tmp_path, 2)
    assert follower.poll() == "step-2"
    write(tmp_path, 3)
    (tmp_path / "step-3" / "model-00001-of-00001.safetensors").unlink()
    assert follower.poll() is None
    assert server.version == "step-2"
    assert "is missing" in str(follower.refused["step-3"])


def test_a_list_of_0_1_0_is_followed_and_continued(tmp_path: Path, server: Server) -> None:
    for version in (9, 10):
        write(tmp_path, version)
    for name in ("step-9", "step-10"):  # as 0.1.0 has written them
        path = tmp_path / name / "snapshot.json"
        content = json.loads(path.read_text())
        del content["publication"], content["base_publication"]
        path.write_text(json.dumps(content))
    (tmp_path / "snapshots.json").write_text('{"names": ["step-9", "step-10"]}')
    follower = SnapshotFollower(tmp_path, server, tmp_path.with_name("cache-of-0.1.0"))
    assert follower.poll() == "step-10"
    whole = follower.read_bytes
    assert follower.poll() is None
    write(tmp_path, 11)
    assert follower.poll() == "step-11"
    assert follower.read_bytes < whole / 4, "of step-10 there are deltas"
    server.publication = next_publication()
    shutil.rmtree(tmp_path / "step-11")
    (tmp_path / "snapshots.json").write_text('{"names": ["step-9", "step-10"]}')
    assert follower.poll() is None, "what has no number is older"


def test_a_server_that_cannot_be_reached_is_no_fault_of_the_snapshot(tmp_path: Path, server: Server) -> None:
    write(tmp_path, 1)
    follower = SnapshotFollower(tmp_path, server)
    server.fails = EngineUnreachable("nobody there")
    with pytest.raises(EngineUnreachable):
        follower.poll()
    server.fails = None
    assert not follower.refused
    assert follower.poll() == "step-1"


def test_a_snapshot_that_the_server_refuses_is_passed_over(tmp_path: Path, server: Server) -> None:
    write(tmp_path, 1)
    follower = SnapshotFollower(tmp_path, server)
    server.fails = EngineRefused("SGLang cannot load it: no such parameter")
    assert follower.poll() is None
    assert follower.poll() is None
    assert server.asked == 1, "it is not asked in every look"
    server.fails = None
    write(tmp_path, 2)
    assert follower.poll() == "step-2"
