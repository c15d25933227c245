"""An engine that started on dummy weights, or has released its own, answers no request until it gets others."""

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from sglang_reshard.errors import TornWeights, WeightsMissing
from sglang_reshard.patches import request_gate, sound_weights, weights_info
from sglang_reshard.patches.http_server import RefusalMiddleware
from test_weights_info import REQUEST

STARTING, UP = SimpleNamespace(name="Starting"), SimpleNamespace(name="Up")


def manager(load_format="dummy", status=UP, arguments=(), **more):
    server_args = SimpleNamespace(load_format=load_format, **{"enable_memory_saver": True} | dict(arguments))
    it = SimpleNamespace(enable_metrics=False, is_pause=False, server_args=server_args, server_status=status)
    vars(it).update(more)
    return it


def release(it, *tags):
    asyncio.run(weights_info.around_release(stock, it, SimpleNamespace(tags=list(tags))))


async def stock(*_, **__):
    return True, "", None


async def fails(*_, **__):
    return False, "no", None


def kind(it):
    return type(request_gate.refusal(it))


def test_an_engine_on_dummy_weights_refuses_until_an_update_has_written():
    it = manager()
    with pytest.raises(WeightsMissing, match="started on dummy weights"):
        request_gate.refuse_on_arrival(it)
    sound_weights.written(it)
    request_gate.refuse_on_arrival(it)


def test_an_engine_with_a_checkpoint_refuses_once_it_has_released_its_weights():
    it = manager("auto")
    assert request_gate.refusal(it) is None
    release(it, "weights")
    with pytest.raises(WeightsMissing, match="has released its weights"):
        request_gate.refuse_on_arrival(it)
    sound_weights.written(it)
    assert request_gate.refusal(it) is None
    release(it, "weights")
    assert kind(it) is WeightsMissing


def test_updates_of_sglang_bring_weights_if_they_succeed():
    it = manager()
    asyncio.run(weights_info.around_update(fails, it))
    assert kind(it) is WeightsMissing
    asyncio.run(weights_info.around_update(stock, it))
    assert request_gate.refusal(it) is None


def test_a_session_of_sglang_that_only_begins_brings_none():
    it = manager()
    asyncio.run(weights_info.around_write(stock, it))
    assert kind(it) is WeightsMissing


def test_a_switch_serves_dummy_weights(monkeypatch):
    monkeypatch.setenv(sound_weights.SERVE_DUMMY, "1")
    assert request_gate.refusal(manager()) is None


def test_torn_weights_come_before_missing_ones():
    it = manager()
    sound_weights.mark(it, "half of update 1")
    assert kind(it) is TornWeights
    sound_weights.heal(it)
    assert kind(it) is WeightsMissing


@pytest.mark.parametrize("paused", [True, False])
def test_requests_that_wait_for_an_update_are_refused_only_if_it_brings_nothing(paused):
    it = manager(is_pause=paused, rid_to_state={"r": None})
    with nullcontext() if paused else weights_info.running(it, "update 1"):
        request_gate.refuse_on_arrival(it)
    with pytest.raises(WeightsMissing):
        request_gate.refuse_registered(it, SimpleNamespace(rid="r"))
    assert it.rid_to_state == {}


START = {"type": "http.response.start", "status": 200, "headers": []}


def asked(app, it, path="/generate"):
    """What a client gets: the status, the body, and what was raised instead of the rest."""
    sent = []

    async def send(message):
        sent.append(message)

    async def answered():
        try:
            await RefusalMiddleware(app, it)({"type": "http", "path": path, "root_path": ""}, None, send)
        except TornWeights as raised:
            return raised

    error = asyncio.run(answered())
    statuses = [m["status"] for m in sent if m["type"] == "http.response.start"]
    return statuses, b"".join(m.get("body", b"") for m in sent), error


def requesting(it):
    async def endpoint(_scope, _receive, send):
        request_gate.refuse_on_arrival(it)
        for message in (START, {"type": "http.response.body", "body": b"token"}):
            await send(message)

    return endpoint


def test_a_stream_that_has_begun_is_broken_off():
    it = manager("auto")

    async def endpoint(_scope, _receive, send):
        for message in (START, {"type": "http.response.body", "body": b"tokens", "more_body": True}):
            await send(message)
        sound_weights.mark(it, "half of update 7")
        request_gate.refuse_on_arrival(it)

    statuses, data, error = asked(endpoint, it)
    assert (statuses, data, type(error)) == ([200], b"tokens", TornWeights)


@pytest.mark.parametrize("path", ["/generate", "/health", "/health_generate"])
def test_a_server_answers_503_until_it_has_weights(path):
    it = manager()
    statuses, data, error = asked(requesting(it), it, path)
    told = json.loads(data)["error"]
    assert (statuses, told["type"], error) == ([503], "WeightsMissing", None)
    assert sound_weights.SERVE_DUMMY in told["message"]
    sound_weights.written(it)
    assert asked(requesting(it), it, path) == ([200], b"token", None)


def test_the_first_request_of_a_server_that_starts_passes():
    it = manager(status=STARTING)
    assert asked(requesting(it), it) == ([200], b"token", None)
    with pytest.raises(WeightsMissing):  # not by HTTP: an embedded engine's status stays as it is
        request_gate.refuse_on_arrival(it)


def test_a_server_that_waits_for_weights_before_it_is_ready_is_told_of_them():
    it = manager(status=STARTING, initial_weights_loaded=False)
    assert asked(requesting(it), it)[0] == [503]
    sound_weights.written(it)
    assert it.initial_weights_loaded
    assert asked(requesting(it), it) == ([200], b"token", None)


# -- what engine ranks are told of weights that SGLang itself has loaded or released


def told(it):
    request = sound_weights.told(it, REQUEST)
    return request.stock_changes, request.stock_loaded


def test_weights_that_are_released_are_lost_and_a_load_from_disk_brings_them():
    it = manager()
    assert told(it) == (1, False)
    sound_weights.loaded(it)
    assert told(it) == (2, True)
    for tags, expected in ((["kv_cache"], (2, True)), (["weights"], (3, False)), ([], (4, False))):  # no tags: all
        release(it, *tags)
        assert told(it) == expected


@pytest.mark.parametrize("arguments", [{"enable_weights_cpu_backup": True}, {"enable_memory_saver": False}])
def test_weights_of_which_there_is_a_copy_and_those_that_stay_are_not_lost(arguments):
    it = manager("auto", arguments=arguments)
    release(it, "weights")
    assert told(it) == (0, True)
