"""What the patches decide without SGLang."""

import asyncio
import json
import multiprocessing
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from sglang_reshard.errors import TornWeights
from sglang_reshard.patches import lora_names, repacking, request_gate, torn_weights
from sglang_reshard.patches.embedded_engine_guard import EngineDied, EngineProcess, EngineProcesses, _WatchedLoop
from sglang_reshard.patches.http_server import RefusalMiddleware
from sglang_reshard.protocol.messages import LoraAdapter
from sglang_reshard.trace.repack import repacked_modules


def model_with(**attributes):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for name, value in attributes.items():
        setattr(model[1], name, value)
    return model


@pytest.mark.parametrize(
    ("enabled", "limit", "name", "says"),
    [
        (True, None, "new", ""),
        (True, 3, "new", ""),
        (True, 2, "a", ""),
        (True, 2, "new", "has 2 LoRA adapters, as many as max_loaded_loras=2 allows"),
        (None, None, "a", "was started without LoRA"),
    ],
)
def test_adapters_that_the_engine_cannot_have_are_refused(enabled, limit, name, says):
    manager = SimpleNamespace(
        server_args=SimpleNamespace(enable_lora=enabled, max_loaded_loras=limit),
        lora_registry=SimpleNamespace(get_all_adapters=lambda: dict.fromkeys("ab")),
    )
    refusal = lora_names.refusal(manager, LoraAdapter(name, "{}"))
    assert says in refusal
    assert bool(refusal) == bool(says)


def scales(dtype):
    return torch.nn.Parameter(torch.ones(1, 1, dtype=dtype), requires_grad=False)


REORDERED = [
    ({"use_intel_amx_backend": True}, "packed for AMX"),
    ({"use_flashinfer_trtllm_moe": True}, "reordered for flashinfer-trtllm"),
    ({"weight_scale_inv": scales(torch.int32)}, "requantized for DeepGEMM"),
]
AS_LOADED = [
    {},
    {"use_intel_amx_backend": False, "use_flashinfer_trtllm_moe": False},
    {"weight_scale_inv": scales(torch.float32)},  # block-fp8's own
    {"weight_scale_inv": scales(torch.uint8)},  # MXFP8's, which the checkpoint has as UE8M0
]


@pytest.mark.parametrize("attributes", AS_LOADED)
def test_weights_as_they_were_loaded_are_not_refused(attributes):
    assert repacking.refusal(model_with(**attributes)) == ""


@pytest.mark.parametrize(("attributes", "says"), REORDERED)
def test_reordered_weights_that_nobody_remembers_are_refused_by_name(attributes, says):
    assert repacking.refusal(model_with(**attributes)).startswith(f"1 was {says}")


class UnquantizedMethod:
    def process_weights_after_loading(self, layer):
        pass


class Fp8LinearMethod(UnquantizedMethod):
    quant_config = SimpleNamespace(weight_block_size=[128, 128])


class OtherMethod(UnquantizedMethod):
    quant_config = SimpleNamespace(weight_block_size=[1, 32], use_mxfp8=True)


@pytest.mark.parametrize("attributes", AS_LOADED)
@pytest.mark.parametrize(
    ("method", "differs"), [(UnquantizedMethod, False), (Fp8LinearMethod, False), (OtherMethod, True)]
)
def test_a_method_that_may_move_elements_runs_again(attributes, method, differs):
    """Shapes do not tell: flashinfer's GEMM for MXFP8 shuffles in place."""
    model = model_with(**attributes, quant_method=method())
    repacking.remember(model)
    assert repacking.refusal(model) == ""
    assert [m.path for m in repacked_modules(model)] == ["1"] * differs


@pytest.mark.parametrize(("attributes", "says"), REORDERED)
def test_reordered_weights_are_reordered_again(attributes, says):
    del says
    model = model_with(quant_method=UnquantizedMethod())
    repacking.remember(model)
    for name, value in attributes.items():
        setattr(model[1], name, value)
    assert repacking.refusal(model) == ""
    assert [m.path for m in repacked_modules(model)] == ["1"]


class DispatchingMethod:
    """As NVFP4's: the dispatcher of experts gets the scale of activations."""

    def process_weights_after_loading(self, layer):
        layer.scale = torch.nn.Parameter(layer.weight.data.amax() * layer.dispatcher.ranks, requires_grad=False)
        layer.dispatcher.set_quant_config({"input_global_scale": layer.scale})


class Dispatcher:
    ranks, quant_config = 2, None

    def set_quant_config(self, quant_config):
        self.quant_config = quant_config


def test_a_live_dispatcher_keeps_the_live_scale():
    """It got one of the copy that is post-processed, which a rehearsal makes of random values."""
    model = model_with(quant_method=DispatchingMethod(), dispatcher=Dispatcher())
    repacking.remember(model)
    experts = model[1]
    experts.quant_method.process_weights_after_loading(experts)
    (module,) = repacked_modules(model)
    made = module.run({"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)})
    assert made["scale"] == 6
    assert experts.dispatcher.quant_config["input_global_scale"] is experts.scale


# -- answers of a torn server


def manager(reason=""):
    it = SimpleNamespace(enable_metrics=False, is_pause=False, server_args=SimpleNamespace(load_format="auto"))
    if reason:
        torn_weights.mark(it, reason)
    return it


async def answered(app, of, path="/generate"):
    """What a client gets: the status, the body, and what was raised instead of the rest."""
    sent = []

    async def send(message):
        sent.append(message)

    try:
        await RefusalMiddleware(app, of)({"type": "http", "path": path, "root_path": ""}, None, send)
        error = None
    except Exception as raised:
        error = raised
    statuses = [m["status"] for m in sent if m["type"] == "http.response.start"]
    return statuses, b"".join(m.get("body", b"") for m in sent), error


def start(status=200):
    return {"type": "http.response.start", "status": status, "headers": []}


def body(data, more=False):
    return {"type": "http.response.body", "body": data, "more_body": more}


def asked(app, of, path="/generate"):
    return asyncio.run(answered(app, of, path))


REFUSAL = {"error": {"message": "half of update 7", "type": "TornWeights", "code": 503}}


def test_a_sound_server_answers_what_its_endpoints_answer():
    async def endpoint(scope, receive, send):
        for message in (start(206), body(b"a", more=True), body(b"b")):
            await send(message)

    assert asked(endpoint, manager()) == ([206], b"ab", None)
    assert asked(endpoint, manager(), "/health") == ([206], b"ab", None)


def test_health_is_not_asked_for_while_torn():
    async def endpoint(scope, receive, send):
        raise AssertionError("it would wait for a token")

    statuses, data, error = asked(endpoint, manager("half of update 7"), "/health")
    assert (statuses, json.loads(data), error) == ([503], REFUSAL, None)


def test_a_refusal_becomes_503_whatever_the_endpoint_makes_of_it():
    of = manager("half of update 7")

    async def raises(scope, receive, send):
        request_gate.refuse_on_arrival(of)

    async def in_a_stream(scope, receive, send):
        await send(start())
        await asyncio.create_task(raises(scope, receive, send))

    async def says_500(scope, receive, send):
        with pytest.raises(TornWeights):
            request_gate.refuse_on_arrival(of)
        await send(start(500))
        await send(body(b"something"))

    for endpoint in (raises, in_a_stream, says_500):
        statuses, data, error = asked(endpoint, of)
        assert (statuses, json.loads(data), error) == ([503], REFUSAL, None)


def test_a_stream_that_has_begun_is_broken_off():
    of = manager()

    async def endpoint(scope, receive, send):
        await send(start())
        await send(body(b"tokens", more=True))
        torn_weights.mark(of, "half of update 7")
        request_gate.refuse_on_arrival(of)

    statuses, data, error = asked(endpoint, of)
    assert (statuses, data) == ([200], b"tokens")
    assert isinstance(error, TornWeights)


def test_other_errors_and_endpoints_that_need_no_weights_are_left_alone():
    async def fails(scope, receive, send):
        raise ZeroDivisionError

    async def says(scope, receive, send):
        await send(start())
        await send(body(b"fine"))

    of = manager("half of update 7")
    assert isinstance(asked(fails, of)[2], ZeroDivisionError)
    assert asked(says, of) == ([200], b"fine", None)


# -- the loop that notices processes that go


@pytest.fixture
def child():
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    yield process
    process.kill()
    process.join()


def watched(process, handle=True):
    member = EngineProcess("scheduler_TP1", psutil.Process(process.pid), process if handle else None)
    return _WatchedLoop(asyncio.new_event_loop(), EngineProcesses((member,), frozenset()))


@pytest.mark.parametrize(("handle", "code"), [(True, "-9"), (False, "unknown")])
def test_a_call_under_way_ends_when_a_process_ends(child, handle, code):
    loop = watched(child, handle)
    cancelled = []

    async def call():
        loop.call_later(0.2, child.kill)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    begin = time.monotonic()
    with pytest.raises(EngineDied, match=rf"scheduler_TP1 \(process {child.pid}\) ended with exit code {code}"):
        loop.run_until_complete(call())
    assert time.monotonic() - begin < 30
    assert cancelled == [True]
    loop.close()


def test_a_watched_loop_returns_and_raises_what_the_call_does(child):
    loop = watched(child)

    async def numbers():
        yield 1

    generator = numbers()
    assert loop.run_until_complete(generator.__anext__()) == 1
    with pytest.raises(StopAsyncIteration):
        loop.run_until_complete(generator.__anext__())
    loop.close()


def test_a_call_that_fails_after_a_process_has_ended_says_that(child):
    loop = watched(child)

    async def call():
        child.kill()
        child.join()
        raise TornWeights("half of update 7")

    with pytest.raises(EngineDied, match="scheduler_TP1") as raised:
        loop.run_until_complete(call())
    assert isinstance(raised.value.__cause__, TornWeights)
    loop.close()
