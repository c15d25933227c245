"""A task runs as its caller would have run it, and its end is its caller's to see."""

import contextlib
import contextvars
import gc
import logging
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from sglang_reshard import tasks
from sglang_reshard.gpu import runtime as gpu
from sglang_reshard.observability.logs import get_logger, log_context
from sglang_reshard.protocol.messages import EngineCommand, Start, UpdateResults
from sglang_reshard.trainer.worker import TrainerWorker

GPU_3 = torch.device("cuda", 3)
SPAN = contextvars.ContextVar("span", default="none")  # as OpenTelemetry keeps the current one


class ThreadsGpu(gpu.CudaRuntime):
    """GPUs of which each thread has a current one, 0 at first."""

    def __init__(self, used):
        super().__init__()
        self._used, self._current = used, threading.local()

    def uses_gpu(self):
        return self._used

    def current_device(self):
        return getattr(self._current, "device", torch.device("cuda", 0))

    @contextlib.contextmanager
    def using(self, device):
        self._current.device = device
        yield


@pytest.fixture(params=[True, False])
def gpus(request):
    before = gpu.runtime()
    gpu.use(found := ThreadsGpu(request.param))
    yield found
    gpu.use(before)


def test_a_task_has_the_callers_gpu_log_attributes_and_span(gpus, caplog):
    gpus._current.device = GPU_3
    SPAN.set("update 7")

    def look():
        get_logger("sglang_reshard.test").warning("here")
        return threading.current_thread().name, SPAN.get(), gpus.current_device()

    with caplog.at_level(logging.WARNING), log_context(update=7, rank="trainer rank 1"):
        name, span, device = tasks.start("looking", look).result(10)
    assert (name, span) == ("sglang-reshard looking", "update 7")
    assert device == (GPU_3 if gpus.uses_gpu() else torch.device("cuda", 0))
    assert [(r.update, r.rank) for r in caplog.records] == [(7, "trainer rank 1")]


def test_each_engines_thread_uses_the_callers_gpu(gpus):
    """Point 18 of the rules of GPUs: a trainer rank has one, and a new thread starts at GPU 0."""
    gpus._current.device = GPU_3
    seen = {}

    def transfers(engine):
        return SimpleNamespace(
            execute=lambda *_: seen.update({engine: gpus.current_device()}), abort=None, release=lambda: None
        )

    scope = SimpleNamespace(on_abort=lambda _: None, leave=lambda: None)
    messages = [*(EngineCommand(engine, Start("t")) for engine in (0, 1)), UpdateResults({})]
    worker = TrainerWorker(None, 0, 1, 1.0, {})
    worker._transfers = {engine: transfers(engine) for engine in (0, 1)}
    worker.run(SimpleNamespace(engine=lambda _: scope, messages=lambda _: messages, update=1), object(), lambda: ())
    assert seen == dict.fromkeys((0, 1), GPU_3 if gpus.uses_gpu() else torch.device("cuda", 0))


def test_what_a_task_raises_is_raised_to_whoever_waits_and_kept_by_nobody_else():
    class Weights:
        pass

    def fail(weights):
        raise ValueError("no")

    weights = Weights()
    gone = weakref.ref(weights)
    gc.disable()
    try:
        found = tasks.start("failing", lambda weights=weights: fail(weights))
        with pytest.raises(ValueError, match="no"):
            found.result(10)
        del weights, found
        assert gone() is None, "a cycle of references keeps what the task was given"
    finally:
        gc.enable()
