"""What requests may do to a server: one that cannot be carried out changes nothing; only schedulers tear weights."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from sglang_reshard.control import Address
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput as Output
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from support.scenarios import until

pytestmark = pytest.mark.engine
UPDATE, PULL, SHARE, PROBE = "/update_weights_distributed", "/pull_weights", "/share_weights", "/record_probe"
ADDRESS = Address("s", "127.0.0.1", 9, "0" * 64)
REQUEST = DistributedUpdateWeightsReq(
    address=ADDRESS, update=1, layout="l", handles=("h",), trainer_hosts=("x",), timeout_s=5.0, weight_version="7"
)
BODY = msgspec.to_builtins(REQUEST)
SHORT = {**BODY, "timeout_s": 0.005}  # of which the schedulers have eight


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((UPDATE, {**BODY, name: 1 << 64}) for name in ("update", "engine", "bucket_bytes", "stock_changes")),
        *((UPDATE, {**BODY, "timeout_s": seconds}) for seconds in (0, -1, 1e-9, 1e308)),
        (UPDATE, {**BODY, "offers": [{str(1 << 64): ""}]}),
        (UPDATE, {**BODY, "offers": [{"-1": ""}]}),
        (UPDATE, {**BODY, "around": {"x" * 100_000: ""}}),
        (UPDATE, {**BODY, "address": {**BODY["address"], "key": "0"}}),
        (UPDATE, {**BODY, "transport": "x" * 100_000}),
        (PULL, {"url": "http://127.0.0.1:9", "timeout_s": 0}),
        (PULL, {"url": "http://127.0.0.1:9", "bucket_bytes": 1 << 70}),
        (SHARE, {"package_version": "1", "timeout_s": -1}),
        (PROBE, {"outcome": "passed", "mean_difference": -1.0, "largest_difference": None, "seconds": 1}),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
async def test_a_value_out_of_range_is_refused_before_the_schedulers_are_asked(engine_class, path, body):
    engine = engine_class()
    async with engine.client() as client:
        answer = await client.post(path, content=json.dumps(body).encode())
    assert (answer.status_code, engine.asked, engine.torn, engine.under_way) == (400, [], "", ""), answer.text
    assert len(answer.text) < 2000


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"update": 1, "\xff\xfe": 1}', "malformed request"),
        (b'{"url": "\xff\xfe", "package_version": "\xff", "layout": "\xff"}', "malformed request"),
        (b'{"z":' + b"[" * 100_000, "nested too deeply"),
        (b'{"update":' + b"9" * 5000 + b"}", "malformed request"),
        (b" " * 200_001, "exceeds 200,000 bytes"),
        (b"", "malformed request"),
    ],
    ids=["no-name", "no-text", "nested", "digits", "long", "empty"],
)
@pytest.mark.parametrize("path", [UPDATE, PULL, SHARE, PROBE])
async def test_bytes_that_are_no_request_are_refused(engine_class, monkeypatch, path, body, says):
    monkeypatch.setattr("sglang_reshard.patches.http_server._MAX_BODY_BYTES", 200_000)
    engine = engine_class()
    async with engine.client() as client:
        answer = await client.post(path, content=body)
    assert (answer.status_code, engine.asked) == (400, [])
    assert says in answer.text


LATE = [
    (Output(success=True, message=""), "", ["7"]),
    (Output(success=False, message="the vote failed"), "", []),
    (Output(success=False, message="half of it", torn=True), "half of it", []),
]


@pytest.mark.parametrize(("late", "torn", "versions"), LATE, ids=["new", "old", "torn"])
@pytest.mark.parametrize("paused", [False, True])
async def test_schedulers_that_answer_late_decide_what_the_weights_are(engine_class, late, torn, versions, paused):
    engine = engine_class(lambda _: late)
    engine.is_pause = paused
    engine.answers.clear()
    async with engine.client() as client:
        answer = await client.post(UPDATE, json=SHORT)
        assert (answer.status_code, answer.json()["torn"]) == (400, False)
        assert "have not answered within 0.04 s" in answer.json()["message"]
        assert engine.torn == "", "nobody knows that yet"
        assert engine.is_pause_cond.locked() if paused else await engine.model_update_lock.is_locked()
        again = await client.post(UPDATE, json={**BODY, "update": 2})
        assert "have not answered update 1 of session s yet" in again.json()["message"]
        assert (await client.get("/weights_info")).json()["under_way"]
        engine.answers.set()
        await until(lambda: not engine.under_way)
    assert (engine.torn, engine.versions, len(engine.asked)) == (torn, versions, 1)
    assert not engine.is_pause_cond.locked()
    assert not await engine.model_update_lock.is_locked()


@pytest.mark.parametrize(("late", "torn", "versions"), LATE, ids=["new", "old", "torn"])
async def test_an_update_that_is_cancelled_while_schedulers_write_is_what_they_say(engine_class, late, torn, versions):
    engine = engine_class(lambda _: late)
    engine.answers.clear()
    update = asyncio.ensure_future(engine.update_weights_distributed(REQUEST))
    await until(lambda: engine.asked)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert (engine.torn, bool(engine.under_way)) == ("", True)
    engine.answers.set()
    await until(lambda: not engine.under_way)
    assert (engine.torn, engine.versions) == (torn, versions)


async def test_an_update_that_is_cancelled_before_schedulers_write_never_asks_them(engine_class):
    engine = engine_class()
    async with engine.model_update_lock.reader_lock:  # a request generates
        update = asyncio.ensure_future(engine.update_weights_distributed(REQUEST))
        await asyncio.sleep(0.01)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
    await until(lambda: not engine.under_way)
    await asyncio.sleep(0.01)
    assert (engine.asked, engine.torn) == ([], "")


async def test_weights_whose_schedulers_answer_what_nobody_can_read_are_torn(engine_class, monkeypatch):
    """The trainer would take an answer that is lost for a success, because the engine ranks have written."""
    engine = engine_class(lambda _: Output(success=True, message=""))
    monkeypatch.setattr("sglang_reshard.protocol.messages.encode", lambda _: b"\xff")
    monkeypatch.setattr("sglang_reshard.patches.io_struct.encode", lambda _: b"\xff")
    async with engine.client() as client:
        answer = await client.post(UPDATE, json=BODY)
    assert (answer.status_code, answer.json()["torn"]) == (400, True)
    assert "the answer of the engine's schedulers to update 1 of session s was lost" in engine.torn


async def test_what_an_update_that_tore_the_weights_has_written_is_of_no_known_version(engine_class):
    """All its engine ranks may have: the version is not the one before, and not its own."""
    engine = engine_class(lambda _: Output(success=False, message="half of it", torn=True))
    async with engine.client() as client:
        await client.post(UPDATE, json=BODY)
        engine.answer = lambda _: Output(success=True, message="", kept=("a",))
        answer = await client.post(UPDATE, json={**BODY, "update": 2, "weight_version": "8"})
    (version,) = answer.json()["kept_versions"]
    assert version.startswith("unknown since an update that failed")


def test_a_cache_that_cannot_be_flushed_after_the_write_is_no_failure_that_left_the_old_weights(
    engine_class, monkeypatch
):
    from sglang_reshard.patches import io_struct, scheduler

    def not_flushed(_):
        raise RuntimeError("the cache was not flushed")

    monkeypatch.setattr(scheduler, "_refusal", lambda *_: "")
    monkeypatch.setattr(scheduler, "_flush_cache", not_flushed)
    monkeypatch.setattr(scheduler.sglang_versions, "engine_rank", lambda _: (0, 1))
    written = Output(success=True, message="written")
    monkeypatch.setattr(scheduler.model_runner, "update_weights_distributed", lambda *_: written)
    asked = msgspec.structs.replace(REQUEST, draft=False, weight_version=None)
    envelope = io_struct.UpdateWeightsDistributedReqInput.of(asked, "update")
    answer = scheduler.update_weights_distributed(
        SimpleNamespace(tp_worker=SimpleNamespace(model_runner=None)), envelope
    ).open()
    assert (answer.success, answer.torn) == (False, True)
    assert "the cache was not flushed" in answer.message


@pytest.mark.parametrize("staged", [False, True])
async def test_a_step_that_fails_in_the_schedulers_way_is_reported_as_it_is(engine_class, staged):
    engine = engine_class(lambda _: Output(success=True, message=""))
    async with engine.client() as client:
        answer = await client.post(UPDATE, json={**BODY, "staged": staged})
    assert answer.status_code == 200
    assert [asked.step for asked in engine.asked] == (["stage", "staged", "commit"] if staged else ["update"])
    assert (engine.torn, engine.versions) == ("", ["7"])


async def test_staging_that_is_not_answered_leaves_the_weights_as_they_are(engine_class):
    engine = engine_class()
    engine.answers.clear()
    async with engine.client() as client:
        answer = await client.post(UPDATE, json={**SHORT, "staged": True})
    assert (answer.json()["torn"], engine.torn, engine.under_way) == (False, "", "")


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_a_prefill_or_a_decode_server_is_updated_only_while_it_is_paused(engine_class, mode):
    """Whether the requests of one server run on the other one, it cannot see."""
    engine = engine_class(lambda _: Output(success=True, message=""))
    engine.server_args.disaggregation_mode = mode
    async with engine.client() as client:
        for body in (BODY, {**BODY, "abort_all_requests": True}, {**BODY, "staged": True}):
            answer = await client.post(UPDATE, json=body)
            assert (answer.status_code, engine.asked, engine.torn) == (400, [], "")
            assert f"the {mode} server is not paused" in answer.json()["message"]
        assert (await client.post(UPDATE, json={**BODY, "flush_cache": False})).status_code == 200
        engine.is_pause = True
        assert (await client.post(UPDATE, json={**BODY, "weight_version": "8"})).status_code == 200
    assert engine.versions == ["7", "8"]


async def test_a_pause_that_is_lifted_before_staged_weights_are_written_is_noticed(engine_class):
    engine = engine_class()

    def answer(_):
        engine.is_pause = False
        return Output(success=True, message="")

    engine.server_args.disaggregation_mode, engine.is_pause, engine.answer = "decode", True, answer
    async with engine.client() as client:
        answered = await client.post(UPDATE, json={**BODY, "staged": True})
    assert "the decode server is not paused" in answered.json()["message"]
    assert [asked.step for asked in engine.asked] == ["stage", "staged"]
    assert (engine.torn, engine.versions) == ("", [])


async def test_the_report_says_that_an_update_does_not_reach_encoder_servers(engine_class):
    """Two servers compute an answer about an image: SGLang's encoder server has no endpoint for an update."""
    engine = engine_class(lambda _: Output(success=True, message="tensors were left out"))
    engine.server_args.language_only = True
    async with engine.client() as client:
        answer = await client.post(UPDATE, json=BODY)
    assert answer.status_code == 200
    assert answer.json()["message"].startswith("tensors were left out; encoder servers compute the embeddings")
