"""Whatever is in a folder of snapshots: a server gets right weights or none, and its follower goes on."""

import logging
import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fuzz.hostile_folder import LIST, SECRET, WEIGHTS, HostileFolder
from fuzz.settings import EXAMPLES, SWEEP, fuzzed_with
from sglang_reshard.errors import ReshardError
from sglang_reshard.extras.snapshots.follower import SnapshotFollower
from support.following import Server
from support.snapshot_writer import weights, write

MOST_GROWTH_KIB = 512 * 1024
_logger = logging.getLogger("sglang_reshard")


@pytest.fixture(scope="module", autouse=True)
def place():
    """Where folders are made, in memory: good ones, and a cache that is at the first snapshot."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield from _place(Path(folder))


def _place(place):
    before, fsync, level = os.getcwd(), os.fsync, _logger.level
    os.chdir(place)
    os.fsync = lambda _: None
    _logger.setLevel(logging.CRITICAL)
    write(place / "good", 1)
    first = Server()
    assert SnapshotFollower(place / "good", first, place / "first").poll() == "step-1"
    place.joinpath("publication").write_text(str(first.publication))
    for version in (2, 3):
        write(place / "good", version)
    shutil.copytree(place / "good", place / "later", symlinks=True)
    write(place / "later", 9)
    test_folders.place = place
    yield place
    os.chdir(before)
    os.fsync = fsync
    _logger.setLevel(level)


@pytest.mark.timeout(1800)
@fuzzed_with(max(EXAMPLES, 10_000) if SWEEP else EXAMPLES)
def test_a_server_gets_right_weights_or_none_and_its_follower_goes_on(random):
    test_folders(random)


@pytest.mark.parametrize("cached", [True, False])
def test_good_folders_are_followed(place, cached):
    folder = _laid_out(place, "good")
    server = Server()
    follower = SnapshotFollower(folder, server, place / "cache" if cached else None)
    assert follower.poll() == "step-3"
    _assert_right(server, folder, forged=False)


def test_folders(random):
    place = test_folders.place
    folder = _laid_out(place, "good")
    hostile = HostileFolder(folder, random)
    for _ in range(random.choice((1, 1, 2, 3))):
        hostile.change()
    server, cache = Server(), None
    if random.random() < 0.6:
        cache = place / "cache"
        if random.random() < 0.6:
            shutil.copytree(place / "first", cache)
            server.version, server.publication = "step-1", int((place / "publication").read_text())
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    follower = SnapshotFollower(folder, server, cache)
    follower.poll()
    for error in follower.refused.values():
        assert isinstance(error, ReshardError), repr(error)
        assert str(place) in str(error), "it names a file"
    if server.loaded:
        _assert_right(server, folder, forged=hostile.forged)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - taken < MOST_GROWTH_KIB
    assert (place / "secret").read_bytes() == SECRET
    if cache is not None:
        assert not any(SECRET[:20] in path.read_bytes() for path in cache.rglob("*") if path.is_file())

    if random.random() < 0.75:
        return
    shutil.copytree(place / "later" / "step-9", folder / "step-9")
    for path in (folder / LIST, folder / "spare"):
        if os.path.lexists(path):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copyfile(place / "later" / LIST, folder / LIST)
    assert follower.poll() == "step-9"
    _assert_right(server, folder, forged=False)


test_folders.__test__ = False


def _laid_out(place, template):
    """A folder whose files are links to those of a template."""
    folder, cache = place / "run", place / "cache"
    for path in (folder, cache):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(place / template, folder, symlinks=True, copy_function=os.link)
    (place / "secret").write_bytes(SECRET)
    return folder


def _assert_right(server, folder, *, forged):
    """The tensors are those of the version; or, of a manifest that was made to agree with them, those in the folder."""
    found, version = server.loaded[-1], int(server.version.removeprefix("step-"))
    expected = weights(version)
    if found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found):
        return
    assert forged, f"{server.version} is not what was written"
    forged_ones = load_file(folder / server.version / WEIGHTS)
    assert found.keys() == forged_ones.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.view(torch.uint8), forged_ones[name].view(torch.uint8))
