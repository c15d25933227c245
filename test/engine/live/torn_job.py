"""What the trainer of test_torn.py does to an engine in its own process: tears it, heals it, kills a process of it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.device_mesh import init_device_mesh

from flights import Flight
from sglang_reshard import DistributedUpdateWeightsReq, VerlEngine
from sglang_reshard.errors import EngineRefused
from sglang_reshard.patches import sound_weights
from sglang_reshard.patches.sound_weights import SERVE_DUMMY
from sglang_reshard.protocol.session import Session
from sglang_reshard.selftest import tiny_model
from support.live_engines import greedy, live_engine
from support.refusals import refusal_of

PROMPT, GREEDY = [5, 6, 7, 8], {"temperature": 0, "ignore_eos": True}
REASON = "engine rank 1 has half of update 7"
SHORT, LONG = 8, 150  # new tokens
WAIT_S = 0.5  # for a request to get to where it has to wait; with less the test would look at less
TP = 2


def start(folder: Path) -> VerlEngine:
    if not (folder / "model").exists():
        tiny_model.save(folder / "model", TP, TP)
    os.environ[SERVE_DUMMY] = "1"  # no update comes before what this looks at
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    return live_engine(mesh, folder / "model", tp_size=TP, load_format="dummy", dtype="float32")


def first(engine: VerlEngine) -> Any:
    assert engine.engine is not None
    return engine.engine


def tokens(engine: VerlEngine) -> list[int]:
    return greedy(engine, [PROMPT], SHORT)[0]


# -- torn


class Torn:
    """One engine, and its loop to run coroutines in."""

    def __init__(self, engine: VerlEngine) -> None:
        self.verl = engine
        self.engine = first(engine)
        self.manager = self.engine.tokenizer_manager

    def run(self, call: Awaitable[Any]) -> Any:
        return self.engine.loop.run_until_complete(call)

    async def generate(self, **options: Any) -> Any:
        return await self.engine.async_generate(
            input_ids=PROMPT, sampling_params={**GREEDY, "max_new_tokens": SHORT}, **options
        )

    async def pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self.manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def go_on(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.manager.continue_generation(ContinueGenerationReqInput())

    def ways(self) -> dict[str, Callable[[], Any]]:
        sampling = {**GREEDY, "max_new_tokens": SHORT}
        return {
            "generate": lambda: self.engine.generate(input_ids=PROMPT, sampling_params=sampling),
            "batch": lambda: self.engine.generate(input_ids=[PROMPT, PROMPT], sampling_params=sampling),
            "several": lambda: self.engine.generate(input_ids=PROMPT, sampling_params={**sampling, "n": 2}),
            "stream": lambda: list(self.engine.generate(input_ids=PROMPT, sampling_params=sampling, stream=True)),
            "async": lambda: self.run(self.generate()),
            "encode": lambda: self.engine.encode(prompt="A shard"),
            "VerlEngine": lambda: tokens(self.verl),
        }

    def refused(self) -> dict[str, list[str]]:
        sound_weights.mark(self.manager, REASON)
        refused = {name: refusal_of(way) for name, way in self.ways().items()}
        sound_weights.heal(self.manager)
        return refused

    def waited_for_a_pause(self) -> list[str]:
        async def go() -> None:
            await self.pause("abort")
            waiting = asyncio.ensure_future(self.generate())
            await asyncio.sleep(WAIT_S)
            assert not waiting.done()
            sound_weights.mark(self.manager, REASON)
            await self.go_on()
            await waiting

        return self.outcome(go)

    def waited_for_an_update(self) -> list[str]:
        async def go() -> None:
            self.manager.auto_create_handle_loop()
            async with self.manager.model_update_lock.writer_lock:
                waiting = asyncio.ensure_future(self.generate())
                await asyncio.sleep(WAIT_S)
                assert not waiting.done()
                sound_weights.mark(self.manager, REASON)
            await waiting

        return self.outcome(go)

    def was_being_tokenized(self) -> list[str]:
        """It has passed both waits when the weights tear under a pause, which waits for no lock."""

        async def go() -> None:
            stock = self.manager._tokenize_one_request

            async def slowly(asked: Any) -> Any:
                await self.pause("retract")
                sound_weights.mark(self.manager, REASON)
                await self.go_on()
                return await stock(asked)

            self.manager._tokenize_one_request = slowly
            try:
                await self.generate()
            finally:
                self.manager._tokenize_one_request = stock

        return self.outcome(go)

    def outcome(self, go: Callable[[], Awaitable[None]]) -> list[str]:
        refusal = refusal_of(lambda: self.run(asyncio.wait_for(go(), 30)))
        sound_weights.heal(self.manager)
        return refusal

    def flight(self, mode: str, before: str) -> dict[str, Any]:
        """A long request, paused half-way, and what the weights do before the pause is "lifted".

        "under way" and "next": they tear while a call that lifts it waits for an update; in that one or in the next.
        """
        flight = Flight(self.engine, PROMPT, LONG)
        had = flight.pause(mode)

        async def next_update() -> None:
            async with self.manager.is_pause_cond:
                sound_weights.mark(self.manager, REASON)

        async def tear() -> None:
            if before in ("under way", "next"):
                async with self.manager.is_pause_cond:  # as an update holds it
                    lifting = asyncio.ensure_future(self.go_on())
                    await asyncio.sleep(WAIT_S)
                    if before == "under way":
                        sound_weights.mark(self.manager, REASON)
                    else:
                        tearing = asyncio.ensure_future(next_update())
                        await asyncio.sleep(WAIT_S)
                await lifting
                if before == "next":
                    await tearing
            else:
                sound_weights.mark(self.manager, REASON)
                if before == "healed":
                    sound_weights.heal(self.manager)
                await self.go_on()

        self.run(asyncio.wait_for(tear(), 60))
        ended = flight.end()
        sound_weights.heal(self.manager)
        return {"had": had, "tokens": ended["count"], "reason": ended["reason"]}


FLIGHTS = {
    "retract": ("retract", "lifted"),
    "in_place": ("in_place", "lifted"),
    "while it is being lifted": ("retract", "under way"),
    "after a look at them": ("retract", "next"),
    "healed": ("retract", "healed"),
}


def tear(engine: VerlEngine) -> dict[str, Any]:
    it = Torn(engine)
    seen: dict[str, Any] = {
        "before": tokens(engine),
        "refused": it.refused(),
        "waited": {
            "for a pause": it.waited_for_a_pause(),
            "for an update": it.waited_for_an_update(),
            "for the tokenizer": it.was_being_tokenized(),
        },
        "left": list(it.manager.rid_to_state),
        "flights": {name: it.flight(*flight) for name, flight in FLIGHTS.items()},
    }
    seen["after"] = tokens(engine)
    return seen


# -- killed


def process(engine: VerlEngine, title: str) -> psutil.Process:
    family = [psutil.Process(pid) for pid in first(engine).get_all_child_pids()]
    return next(p for p in family if title in p.cmdline()[0])


def timed(call: Callable[[], Any]) -> dict[str, Any]:
    begin = time.monotonic()
    told = refusal_of(call)
    return {"told": told, "seconds": time.monotonic() - begin}


def killed_under(engine: VerlEngine, call: Callable[[], Any]) -> dict[str, Any]:
    """Engine rank 1 is killed a second after the call has begun, which cannot end: engine rank 0 is stopped."""
    process(engine, "scheduler_TP0").suspend()
    victim = process(engine, "scheduler_TP1")
    threading.Timer(1.0, victim.kill).start()
    return {"pid": victim.pid, **timed(call)}


def update(engine: VerlEngine) -> None:
    """An update whose layout is none: the schedulers would find that out, and never answer here."""
    session = Session.host()
    with session.trainer_channel(1, "trainer rank 0"):
        request = DistributedUpdateWeightsReq(
            address=session.address,
            update=1,
            layout=session.put(("no layout",)),
            handles=("",),
            trainer_hosts=("",),
        )
        answer = first(engine).update_weights_distributed(request)
    session.end(1)
    assert not answer.success
    raise EngineRefused(answer.message)


def lose_processes(engine: VerlEngine, folder: Path) -> dict[str, Any]:
    """Two engines one after the other in this process, each of which loses processes of its own."""
    before = tokens(engine)
    segments = first(engine)._reshard_processes.segments
    other = process(engine, "scheduler_TP0")
    seen: dict[str, Any] = {"update": killed_under(engine, lambda: update(engine))}
    other.resume()
    time.sleep(3)  # a training step. Engine rank 0 fails meanwhile, and says so to this process as SGLang has it
    seen["after a step"] = timed(lambda: tokens(engine))
    seen["update after a step"] = timed(lambda: update(engine))
    engine.shutdown()
    seen["segments"] = [len(segments), [str(s) for s in segments if s.exists()]]
    engine = start(folder)
    seen["same tokens"] = tokens(engine) == before
    seen["generate"] = killed_under(engine, lambda: tokens(engine))
    engine.shutdown()
    return seen


def all_of_it(job: dict[str, Any]) -> dict[str, Any]:
    folder = Path(job["folder"])
    terminate = signal.signal(signal.SIGTERM, on_terminate)
    engine = start(folder)
    seen = {"torn": tear(engine), "lost": lose_processes(engine, folder)}
    os.kill(os.getpid(), signal.SIGTERM)
    seen["terminated"] = list(TERMINATED)
    seen["quit"] = signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, terminate)
    return seen


TERMINATED: list[int] = []


def on_terminate(number: int, _frame: Any) -> None:
    TERMINATED.append(number)
