"""What a server says of its weights is true at every moment: it forgets what it cannot know any more."""

import asyncio
import contextlib
from types import SimpleNamespace

import msgspec
import pytest

from sglang_reshard.control import Address
from sglang_reshard.errors import EngineRefused
from sglang_reshard.observability.report import RankReport
from sglang_reshard.patches import sound_weights, weights_info
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq
from sglang_reshard.protocol.weights_info import LayoutInfo, WeightsInfo
from sglang_reshard.version import PROTOCOL, __version__

REQUEST = DistributedUpdateWeightsReq(
    address=Address("ab12/replica 0", "127.0.0.1", 1, "5ec2e7"),
    update=7,
    layout="1a70",
    handles=("h", "h"),
    trainer_hosts=("host", "host"),
    weight_version="42",
    verify="full",
)
RANKS = tuple(RankReport(rank, 1, 1, 0, {}) for rank in range(4))
OUTPUT = DistributedUpdateWeightsOutput(
    success=True, message="", transport="ipc", digest="d1", tensors=310, source_bytes=1192, ranks=RANKS
)
NOTHING = WeightsInfo(version="42", package_version=__version__, protocol=PROTOCOL)
ALL = WeightsInfo(
    version="42",
    package_version=__version__,
    protocol=PROTOCOL,
    digest="d1",
    verified="full",
    session="ab12/replica 0",
    update=7,
    transport="ipc",
    engine_ranks=4,
    layout=LayoutInfo("1a70", 2, 310, 1192),
)


@pytest.fixture
def manager():
    """SGLang's tokenizer manager, as far as it is looked at, after an update."""
    arguments = SimpleNamespace(weight_version="42", dp_size=1, enable_lora=False)
    it = SimpleNamespace(enable_metrics=False, is_pause=False, server_args=arguments)
    weights_info.record(it, REQUEST, OUTPUT)
    return it


async def succeeds(manager, *_):
    return weights_info.current(manager)


async def fails(manager, *_):
    raise RuntimeError("half of it was written")


async def overlaps(manager, *_):
    weights_info.record(manager, REQUEST, OUTPUT)


def by_others(write):
    """An update by others, which may fail."""

    def update(manager):
        with pytest.raises(RuntimeError) if write is fails else contextlib.nullcontext():
            asyncio.run(weights_info.around_write(write, manager, "obj"))

    return update


def released(*tags, everything=False):
    asked = SimpleNamespace(tags=None if everything else list(tags))
    return lambda it: asyncio.run(weights_info.around_release(succeeds, it, asked))


@pytest.mark.parametrize(
    ("happens", "left"),
    [
        (lambda it: None, ALL),
        (lambda it: setattr(it, "is_pause", True), msgspec.structs.replace(ALL, paused=True)),
        (lambda it: sound_weights.mark(it, "half"), msgspec.structs.replace(NOTHING, torn="half")),
        (by_others(succeeds), NOTHING),
        (by_others(fails), NOTHING),
        (by_others(overlaps), NOTHING),
        (released(everything=True), NOTHING),
        (released("weights"), NOTHING),
        (released(), NOTHING),
        (released("kv_cache"), ALL),
    ],
)
def test_what_is_told_is_what_is_known(manager, happens, left):
    happens(manager)
    assert weights_info.current(manager) == left
    assert REQUEST.address.key not in str(weights_info.current(manager))


def test_an_update_under_way_is_told(manager):
    for state in ("running", "unanswered"):
        with weights_info.running(manager, "update 8 is running", state):
            assert weights_info.current(manager).under_way
            assert weights_info.current(manager).digest == "d1"
            assert weights_info.under_way(manager) == "update 8 is running"
    assert weights_info.current(manager) == ALL


@pytest.mark.parametrize("state", ["running", "unanswered"])
def test_weights_are_not_released_while_an_update_runs(manager, state):
    """A staged one reads them in a thread, and SGLang unmaps them without a wait: that would end the scheduler."""
    asked = []

    async def release(manager, *_):
        asked.append("schedulers")

    with weights_info.running(manager, "update 8 is running; repeat this one when it has ended", state):
        with pytest.raises(EngineRefused, match="cannot be released: update 8 is running; repeat this one when it has"):
            asyncio.run(weights_info.around_release(release, manager, SimpleNamespace(tags=["weights"])))
        assert not asked
        asyncio.run(weights_info.around_release(release, manager, SimpleNamespace(tags=["kv_cache"])))
    asyncio.run(weights_info.around_release(release, manager, SimpleNamespace(tags=["weights"])))
    assert asked == ["schedulers"] * 2


def test_weights_are_not_released_if_an_update_begins_while_others_take_them(manager):
    async def release(*_):
        raise AssertionError("the schedulers were asked")

    async def both():
        other = Other(begun=True, seconds=0.1, order=[])
        weights_info.add_share(manager, other.task, other)
        releasing = asyncio.create_task(weights_info.around_release(release, manager, SimpleNamespace(tags=[])))
        await asyncio.sleep(0)
        with weights_info.running(manager, "update 8 is running"), pytest.raises(EngineRefused, match="update 8"):
            await releasing

    asyncio.run(both())


class Other:
    """Another engine that takes the weights, for `seconds`."""

    def __init__(self, begun, seconds, order):
        self._begun, self._seconds, self._order, self._ended = begun, seconds, order, asyncio.Event()
        self.task = asyncio.create_task(self._read())

    async def _read(self):
        try:
            await asyncio.wait_for(self._ended.wait(), self._seconds)
            self._order.append("ended")
        except asyncio.TimeoutError:
            self._order.append("shared")

    def has_begun(self):
        return self._begun

    async def end(self):
        self._ended.set()


@pytest.mark.parametrize(
    ("begun", "seconds", "order"),
    [
        (True, 0.05, ["shared", "written"]),
        (False, 0.05, ["shared", "written"]),
        (False, 60, ["ended", "written"]),  # nobody came for them
        (True, 60, ["ended", "written"]),  # taken, and never answered
    ],
)
def test_what_writes_waits_until_the_weights_are_no_longer_shared_but_not_for_long(
    manager, monkeypatch, begun, seconds, order
):
    monkeypatch.setattr(weights_info, "_BEGIN_S", 0.2)
    monkeypatch.setattr(weights_info, "_READ_S", 0.4)
    found = []

    async def write(_manager):
        found.append("written")

    async def both():
        other = Other(begun, seconds, found)
        weights_info.add_share(manager, other.task, other)
        await asyncio.wait_for(weights_info.around_write(write, manager), 5)
        assert other.task.done()

    asyncio.run(both())
    assert found == order


def test_more_engines_than_there_is_room_for_are_refused(manager):
    async def many():
        others = [Other(True, 60, []) for _ in range(17)]
        for other in others[:16]:
            weights_info.add_share(manager, other.task, other)
        with pytest.raises(EngineRefused, match="16 other engines take the live weights already"):
            weights_info.add_share(manager, others[16].task, others[16])
        for other in others:
            await other.end()
        await asyncio.gather(*(other.task for other in others))
        last = Other(True, 0, [])
        weights_info.add_share(manager, last.task, last)
        await last.task

    asyncio.run(many())


def left(manager, version, kept=(), draft=True):
    """What an update to this version says of the parameters that it left."""
    request = msgspec.structs.replace(REQUEST, weight_version=version, draft=draft)
    output = weights_info.record(manager, request, msgspec.structs.replace(OUTPUT, kept=tuple(kept)))
    manager.server_args.weight_version = version  # as SGLang does afterwards
    assert weights_info.current(manager).kept_versions == output.kept_versions
    return output.kept_versions


@pytest.mark.parametrize(
    "updates",
    [
        [
            (["a", "b"], {"42": ("a", "b")}),
            (["b", "c"], {"42": ("b",), "43": ("c",)}),
            (["a", "b", "c"], {"44": ("a",), "42": ("b",), "43": ("c",)}),
            ([], {}),
            (["b"], {"46": ("b",)}),
        ],
        [  # parts of parameters; where the whole stays as it is, so does the part within it
            (["a[k]"], {"42": ("a[k]",)}),
            (["a"], {"43": ("a",), "42": ("a[k]",)}),
            (["a[k]", "a[v]"], {"42": ("a[k]",), "43": ("a[v]",)}),
            (["a[v]", "b"], {"43": ("a[v]",), "45": ("b",)}),
            (["a[k]"], {"46": ("a[k]",)}),
        ],
    ],
)
def test_parameters_that_updates_leave_keep_their_version(manager, updates):
    for version, (kept, expected) in enumerate(updates, start=43):
        assert left(manager, str(version), kept) == expected


def test_merged_adapters_are_in_the_weights_until_these_are_written_again(manager):
    def after(merged, kept=()):
        request = msgspec.structs.replace(REQUEST, merged=merged)
        weights_info.record(manager, request, msgspec.structs.replace(OUTPUT, kept=kept))
        return weights_info.of(manager).merged

    assert after(("default",), ("tower",)) == ("default",)
    assert after((), ("tower", "layer")) == ("default",)
    assert after((), ("tower",)) == ()
    assert after((), ("tower", "layer")) == ()
    assert after(("default",)) == ("default",)
    weights_info.clear(manager)
    assert weights_info.of(manager).merged == ()


def test_the_digest_tells_versions_of_kept_parameters_apart(manager):
    def digest_after(versions, kept):
        """The digest of an update with the same weights as all others, after updates to `versions`."""
        weights_info.clear(manager)
        for version in versions:
            left(manager, version)
        request = msgspec.structs.replace(REQUEST, weight_version="9")
        output = msgspec.structs.replace(OUTPUT, kept=kept, digest="00000000000000ff")
        output = weights_info.record(manager, request, output)
        assert weights_info.current(manager).digest == output.digest
        return output.digest

    assert digest_after(["7"], ()) == digest_after(["8"], ()) == "00000000000000ff"
    assert digest_after(["7"], ("a", "b")) == digest_after(["6", "7"], ("b", "a"))
    assert len({digest_after([v], kept) for v in ("7", "8") for kept in (("a",), ("b",), ("a", "b"))}) == 6


async def updates(manager, obj):
    """An update of SGLang's own, of some tensors or of all."""
    if obj.success and obj.weight_version is not None:
        manager.server_args.weight_version = obj.weight_version
    if obj.whole:
        weights_info.of(manager).whole_load = True
    return obj.success, "message"


def by_sglang(manager, around, version, success=True, whole=False):
    asked = SimpleNamespace(weight_version=version, success=success, whole=whole)
    asyncio.run(around(updates, manager, asked))
    assert weights_info.current(manager).kept_versions == {}


def test_what_sglang_loads_from_disk_is_of_its_version(manager):
    left(manager, "43", ["a"])
    by_sglang(manager, weights_info.around_load, "from disk", whole=True)
    assert left(manager, "44", ["a"]) == {"from disk": ("a",)}


@pytest.mark.parametrize(
    ("around", "version", "success"),
    [
        (weights_info.around_update, "44", True),  # of some tensors: of which ones is unknown
        (weights_info.around_update, None, True),
        (weights_info.around_update, "44", False),
        (weights_info.around_load, None, True),  # the engine's version is that of the weights before
        (weights_info.around_load, "44", False),  # it may have written some
        (weights_info.around_load, "44", True),  # the folder may lack some
    ],
)
def test_what_sglang_may_have_written_is_of_no_known_version(manager, around, version, success):
    manager.server_args.speculative_algorithm = "EAGLE"
    left(manager, "43", ["a"])
    by_sglang(manager, around, version, success)
    (unknown,) = first = left(manager, "45", ["a", "b"], draft=False)
    assert (first[unknown], unknown.startswith("unknown since")) == (("a", "b", "draft.*"), True)
    assert left(manager, "46", ["a", "c"]) == {unknown: ("a",), "45": ("c",)}
    by_sglang(manager, around, version, success)
    (another,) = left(manager, "47", ["a"])
    assert another != unknown


def test_a_load_may_not_have_reached_the_draft(manager):
    manager.server_args.speculative_algorithm = "EAGLE"
    left(manager, "43", ["a"])
    by_sglang(manager, weights_info.around_load, "from disk", whole=True)
    found = left(manager, "44", ["a"], draft=False)
    assert found.pop("from disk") == ("a",)
    assert [*found.values()] == [("draft.*",)]
    assert next(iter(found)).startswith("unknown since")


def test_draft_models_and_their_target_have_versions_of_their_own(manager):
    assert left(manager, "43", draft=False) == {}, "it has none"
    manager.server_args.speculative_algorithm = "EAGLE"
    assert left(manager, "44", draft=False) == {"43": ("draft.*",)}
    assert left(manager, "45", ["a"], draft=False) == {"44": ("a",), "43": ("draft.*",)}
    assert left(manager, "46", ["a"]) == {"44": ("a",)}
