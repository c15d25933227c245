"""A shard's memory goes while engine ranks have it mapped, or between two updates: exact or refused, never garbage."""

import threading
from pathlib import Path

import pytest
import torch

from support.player import Hang
from support.scenes import wait_until


def free(me):
    """What a trainer that offloads does: the tensor stays, its memory goes."""
    for _, tensor in me.state:
        tensor._local_tensor.untyped_storage().resize_(0)


def replace(me):
    """Each shard moves to other memory, and what it was in is freed."""
    for _, tensor in me.state:
        tensor._local_tensor = tensor._local_tensor.clone()


def give_back(me):
    for _, tensor in me.state:
        tensor._local_tensor = torch.empty(tensor._local_tensor.shape)


def when_asked(me, what, path):
    """Do it in a thread, once a file is there; its absence tells that it was done."""

    def run():
        wait_until(Path(path).exists, 60, "being asked")
        what(me)
        Path(path).unlink()

    threading.Thread(target=run, daemon=True).start()


@pytest.mark.parametrize("what", [free, replace])
@pytest.mark.parametrize("again", [False, True])
def test_memory_that_goes_in_the_middle_of_a_move(scene, case, tmp_path, what, again):
    """`again`: in an update for which nothing else is done, as nothing has changed since the one before."""
    with case(f"shards: {what.__name__}", "move" + ", again" * again, "ipc") as row:
        scene.start_trainers()  # torch does not let all shared storages shrink, but theirs
        ask = tmp_path / "ask"
        for player in scene.trainers:
            scene.call(player, when_asked, what, f"{ask}-{player.rank}")
        if again:
            scene.make_good("ipc")
        new = scene.hold(scene.engines[0], "move", "ipc", alike=again)
        for player in scene.trainers:
            Path(f"{ask}-{player.rank}").touch()
        wait_until(lambda: not list(tmp_path.iterdir()), 60, "the memory to go")
        scene.let_go(scene.engines[0])
        scene.until_ended()
        row.outcome = scene.judge(new)
        assert row.outcome == "new weights", scene.failures()
        if what is free:
            for player in scene.trainers:
                scene.call(player, give_back)
        scene.make_good("ipc", verify="full")
        row.outcome += "; so had the next update"


@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast"])
def test_memory_that_went_between_updates_is_refused_by_name(scene, case, transport):
    with case("shards: free", "between updates", transport) as row:
        scene.start_trainers()
        scene.make_good(transport)
        for player in scene.trainers:
            scene.call(player, free)
        scene.update(None, transport)
        scene.until_ended()
        for ended in scene.failures().values():
            assert ended.kind == "Unsupported"
            assert "embed.weight" in ended.message
            assert "no longer has memory" in ended.message
        row.outcome = scene.judge(-1)
        assert row.outcome == "old weights"
        for player in scene.trainers:
            scene.call(player, give_back)
        scene.make_good(transport)
        row.outcome += "; the next update made it good"


@pytest.mark.parametrize("transport", ["ipc", "p2p", "broadcast"])
def test_memory_that_was_replaced_between_updates_is_read_from_where_it_is_now(scene, case, transport):
    with case("shards: replace", "between updates", transport) as row:
        scene.make_good(transport)
        for player in scene.trainers:
            scene.call(player, replace)
        new = scene.begin(transport)
        scene.until_ended()
        row.outcome = scene.judge(new)
        assert row.outcome == "new weights", scene.failures()


def test_a_trainer_that_never_is_asked_is_a_hang():
    """The deadline of these tests works."""
    with pytest.raises(Hang):
        wait_until(lambda: False, 0.1, "nothing")
