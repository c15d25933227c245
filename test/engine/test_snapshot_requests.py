"""Which snapshots a server loads, when, and what is true when its client has gone."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput as Output
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq, StockLoadReq
from support.scenarios import until
from support.snapshot_writer import write

pytestmark = pytest.mark.engine
DONE = Output(success=True, message="")


@pytest.fixture
def folder(tmp_path):
    for version in (1, 2, 3):
        write(tmp_path, version)
    return tmp_path


def publication(folder, version):
    return json.loads((folder / f"step-{version}" / "snapshot.json").read_text())["publication"]


def request(folder, version, **options):
    number = publication(folder, version)
    path = str(folder / f"step-{version}")
    return {"path": path, "version": f"step-{version}", "publication": number, "timeout_s": 30, **options}


async def load(engine, asked):
    async with engine.client() as client:
        answer = await client.post("/load_snapshot", json=asked)
    return answer.status_code, answer.json()


async def test_it_loads_nothing_earlier_than_it_has_held_unless_that_is_asked_for(engine_class, folder):
    from sglang_reshard.patches import weights_info

    engine = engine_class(lambda _: DONE)
    assert await load(engine, request(folder, 2)) == (200, {"success": True, "message": "", "read_bytes": 0})
    assert weights_info.current(engine).publication == publication(folder, 2)
    status, refused = await load(engine, request(folder, 1))
    assert (status, refused["success"]) == (200, False)
    assert "holds later weights than snapshot 'step-1'" in refused["message"]
    engine.answer = lambda _: Output(success=False, message="no such parameter")
    status, refused = await load(engine, request(folder, 3))
    assert status == 400
    assert "snapshot step-3 was not loaded: no such parameter" in refused["error"]["message"]
    assert weights_info.current(engine).publication == publication(folder, 2)
    engine.answer = lambda _: DONE
    assert (await load(engine, request(folder, 1, allow_rollback=True)))[1]["success"]
    assert weights_info.current(engine).publication == publication(folder, 1)
    assert engine.versions == ["step-2", "step-1"]
    with weights_info.running(engine, "update 8 is running"):
        assert (await load(engine, request(folder, 3)))[1]["message"] == "update 8 is running"


async def test_two_loads_do_not_run_at_once(engine_class, folder):
    engine = engine_class(lambda _: DONE)
    engine.answers.clear()
    first = asyncio.ensure_future(load(engine, request(folder, 2)))
    await until(lambda: engine.asked)
    _, second = await load(engine, request(folder, 3))
    assert "snapshot step-2 is being loaded" in second["message"]
    engine.answers.set()
    assert (await first)[1]["success"]
    assert (await load(engine, request(folder, 3)))[1]["success"]


@pytest.mark.parametrize("staged", [True, False])
async def test_a_load_ends_with_its_client_unless_the_schedulers_write(engine_class, folder, staged):
    """An answer that is lost changes nothing later: the load is over, or it is as good as answered."""
    from support.asgi_engine import Connection

    engine = engine_class(lambda _: DONE)
    async with engine.model_update_lock.reader_lock:  # a request runs
        connection = Connection(engine.app, "/load_snapshot", request(folder, 2, staged=staged))
        await until(lambda: any(e.step == "staged" for e in engine.asked) if staged else engine.under_way)
        await asyncio.sleep(0.05)
        connection.disconnect()
        await connection.task
        await until(lambda: not engine.under_way)
    await asyncio.sleep(0.05)
    assert not [e for e in engine.asked if e.step in ("update", "commit")]
    assert engine.versions == []

    engine.answers.clear()
    connection = Connection(engine.app, "/load_snapshot", request(folder, 3, staged=False))
    await until(lambda: any(e.step == "update" for e in engine.asked))
    connection.disconnect()
    await connection.task
    assert engine.under_way, "the schedulers write"
    engine.answers.set()
    await until(lambda: not engine.under_way)
    assert engine.versions == ["step-3"]


async def test_without_memory_for_both_it_is_received_in_place(engine_class, folder):
    from sglang_reshard.landings.shadow import NO_ROOM

    def answer(request):
        message = f"plan, engine rank 0: {NO_ROOM} 7 bytes"
        return Output(success=False, message=message, phase="plan") if request.staged else DONE

    engine = engine_class(answer)
    assert (await load(engine, request(folder, 2)))[1]["success"]
    assert [envelope.step for envelope in engine.asked] == ["stage", "update"]
    first, last = (engine.asked[n].open(DistributedUpdateWeightsReq) for n in (0, -1))
    assert last.transport == "disk"
    assert first.address != last.address, "a session of its own"


async def test_torn_weights_are_told_and_made_good_by_the_same_snapshot(engine_class, folder):
    engine = engine_class(lambda _: Output(success=False, torn=True, message="a disk has failed"))
    status, failed = await load(engine, request(folder, 2, staged=False))
    assert (status, failed["error"]["type"]) == (400, "TornWeights")
    assert engine.torn
    engine.answer, engine.server_args.weight_version = (lambda _: DONE), "step-2"
    assert (await load(engine, request(folder, 2)))[1]["success"]
    assert not engine.torn


@pytest.mark.parametrize("path", ["{folder}/gone", "step-2", "{folder}", "org/model"])
async def test_a_path_that_is_no_snapshot_is_refused_and_looked_up_nowhere(engine_class, folder, path):
    engine = engine_class(lambda _: DONE)
    status, failed = await load(engine, request(folder, 2) | {"path": path.format(folder=folder)})
    assert (status, failed["error"]["type"]) == (400, "Mismatch")
    assert not engine.asked


LOADED, UNTOUCHED = Output(success=True, message=""), Output(success=False, message="")
TORN = Output(success=False, message="engine rank 1: ValueError: shape", torn=True)
LACKING = Output(success=False, message="engine rank 0: q is not written")
BEFORE = {"sound": ("auto", ""), "missing": ("dummy", ""), "torn": ("auto", "half of update 7")}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(
    ("stock", "replicas", "after"),
    [
        (True, [LOADED, LOADED], "sound"),
        (True, [LOADED, LACKING], "torn"),  # they have different weights
        (True, [LACKING, LACKING], "as before"),
        (True, [LOADED, TORN], "torn"),
        (True, [TORN, TORN], "torn"),
        (True, [LOADED, UNTOUCHED], "torn"),
        (False, [UNTOUCHED, UNTOUCHED], "as before"),
        (False, [LOADED, UNTOUCHED], "torn"),
        (False, [LOADED, TORN], "torn"),
        (False, [TORN, TORN], "torn"),
    ],
)
async def test_a_load_of_sglangs_own_counts_for_what_it_has_done_on_all_ranks(
    engine_class, before, stock, replicas, after
):
    from sglang_reshard.patches import disk_loads, io_struct, request_gate, sound_weights

    async def stock_load(_manager, _obj):
        return stock, "SGLang's message.", 0

    from sglang_reshard.errors import TornWeights, WeightsMissing

    KINDS = ((TornWeights, "torn"), (WeightsMissing, "missing"))
    engine = engine_class()
    engine.server_args.load_format, torn = BEFORE[before]
    if torn:
        sound_weights.mark(engine, torn)
    asked = []

    async def communicator(envelope):
        asked.append(envelope.open(StockLoadReq))
        return [io_struct.UpdateWeightsDistributedReqOutput.of(output) for output in replicas]

    engine.update_weights_distributed_communicator = communicator
    load = SimpleNamespace(weight_version=None)
    success, message, _ = await disk_loads.update_from_disk(stock_load, engine, load)
    found = request_gate.refusal(engine)
    state = {type(None): "sound", **{kind: name for kind, name in KINDS}}[type(found)]
    assert state == (before if after == "as before" else after)
    assert asked[0].complete == (stock and before != "sound"), "a trace is not made for nothing"
    assert success == (stock and (after == "sound" or (before, after) == ("sound", "as before")))
    assert message.startswith("SGLang's message.") or not success
