"""The steps of one run, which all trainer ranks take together. Nothing in this package judges them.

bits             each live tensor of each engine rank has the digest that SGLang's own load of the trainer's
                 checkpoint leaves there
words            the engine's tokens have the log-probabilities that transformers computes from that checkpoint
limit            one copy of as many bytes on the same device, and between trainer ranks by torch
SGLang's own     `update_weights_from_tensor` with tensors that are whole already
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.errors import ReshardError, Unsupported
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.selftest import stock
from sglang_reshard.selftest.asking import prompts, said
from sglang_reshard.selftest.digests import differing, read_live_digests
from sglang_reshard.selftest.events import EventWriter, Row
from sglang_reshard.selftest.job import Job
from sglang_reshard.selftest.reference import Said, distance
from sglang_reshard.selftest.trainer import Trainer

WARM_UPDATES = 5
_TIMEOUT_S = 120.0
_CACHED_PROMPTS, _CACHED_TOKENS = 12, 100  # more than the pool of `choice.HIERARCHICAL` holds


class Steps:
    """The steps of one run; `engine` is None on all trainer ranks but the first.

    url, key  of a server; by default the engine is in the first trainer rank's process
    """

    def __init__(
        self, job: Job, trainer: Trainer, engine: Any, device: torch.device, url: str = "", key: str = ""
    ) -> None:
        self._run, self._folder, self._ends_at = job.run, Path(job.folder), job.ends_at
        self._trainer, self._engine, self._device, self._url, self._key = trainer, engine, device, url, key
        self._prompts = prompts(trainer.vocabulary)
        # SGLang's experts for CPUs compute no shares of EP.
        self._answers = self._run.device == "cuda" or self._run.target.ep == 1
        self._events = EventWriter(Path(job.events) if dist.get_rank() == 0 else None)
        self._sender = self._open("auto")
        self._version = 0
        self._limit = self._stock = 0.0
        self._last: UpdateReport | None = None

    def take(self) -> None:
        """Takes the parts of the run, as far as there is time."""
        for part in self._run.parts:
            if not self._has_time():
                self._saw(part, None, why="left out: the time was up")
                continue
            PARTS[part](self)
        self._sender.close()

    # -- parts

    def _first_update(self) -> None:
        look = self._says if self._answers else self._digests
        before = look()
        self._trainer.step(self._version)
        with self._events.phase(f"first update, {self._run.source} -> {self._run.target}") as notes:
            seconds, report = self._update(self._sender)
            notes.append(f"{report.transport}, {report.received_bytes / 1e6:.1f} MB")
        after = look()
        changed = self._engine is None or after != before
        self._saw("first update", changed, report.transport, report.received_bytes, seconds,
                  why="" if changed else "the engine is as it was before the update", more=_phases(report))  # fmt: skip

    def _bits(self) -> None:
        self._trainer.step(self._version)
        self._update(self._sender)
        ours, folder = self._digests(), self._folder / "checkpoint"
        self._trainer.save_checkpoint(folder)
        if self._answers:
            self._words(folder, self._says())
        self._trainer.step(self._version)
        self._update(self._sender)
        between = self._digests()  # a load that does nothing would be noticed
        with self._events.phase("SGLang loads the trainer's checkpoint"):
            loaded = self._stock_load(folder)
        different = differing(ours, loaded)
        right = bool(ours) and not different and between != loaded
        more = {"tensors": sum(map(len, ours)), "engine_ranks": len(ours), "different": len(different)}
        self._saw("every tensor, as SGLang's own load leaves it", right, why=", ".join(different[:3]), more=more)

    def _whole_words(self) -> None:
        """Without a comparison of tensors, for an engine whose host does not see the checkpoint."""
        self._trainer.step(self._version)
        self._update(self._sender)
        checkpoint = self._folder / "checkpoint"
        self._trainer.save_checkpoint(checkpoint)
        self._words(checkpoint, self._says())

    def _words(self, checkpoint: Path, ours: Said) -> None:
        if self._engine is not None:
            with self._events.phase("transformers reads the same checkpoint"):
                apart = distance(checkpoint, self._prompts, ours, self._device)
            wrong = apart.wrong(self._run.dtype)
            self._saw("log-probabilities, as transformers has them", not wrong, why=wrong, more=apart._asdict())
        dist.barrier()

    def _limits(self) -> None:
        """One copy on a device of as many bytes as an engine rank receives, and one between two trainer ranks."""
        nbytes = max(rank.received_bytes for rank in self._report.engine_ranks)
        source, copy = (torch.zeros(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2))
        self._limit = self._median(lambda: copy.copy_(source))
        self._saw("limit: one copy of as many bytes", None, "", nbytes, self._limit)
        if dist.get_world_size() > 1 and (self._device.type == "cpu" or self._trainer.learns):
            seconds = self._median(lambda: _pass_on(source))
            self._saw(f"limit: between two trainer ranks, {_backend(source)}", None, "", nbytes, seconds)

    def _own_update(self) -> None:
        """SGLang's own update, of tensors that are whole already: gathering them is not timed."""
        whole = [(name, tensor.to(self._device)) for name, tensor in self._trainer.whole()]
        if self._engine is None:
            whole = []
        call = lambda: None if self._engine is None else stock.update(self._engine, whole)  # noqa: E731
        with self._events.phase("SGLang's own update, of whole tensors"):
            self._stock = self._median(call, 2)
        self._saw("SGLang's own update, without its gather", None, "", self._trainer.nbytes, self._stock)

    def _routes(self) -> None:
        for route in self._run.routes:
            name = f"warm update, {route}"
            try:
                with self._events.phase(name), self._opened(route) as sender:
                    updates = [self._stepped(sender) for _ in range(WARM_UPDATES + 1)]
            except ReshardError as error:  # the same on all trainer ranks
                self._saw(name, None if isinstance(error, Unsupported) else False, route, why=str(error))
                continue
            seconds, report = statistics.median(s for s, _ in updates[1:]), updates[-1][1]
            self._saw(name, True, report.transport, report.received_bytes, seconds, limit=self._limit,
                      stock=self._stock, more=_phases(report))  # fmt: skip

    def _verified(self) -> None:
        for verify in ("sample", "full"):
            updates = [self._stepped(self._sender, verify=verify) for _ in range(WARM_UPDATES + 1)]
            seconds, report = statistics.median(s for s, _ in updates[1:]), updates[-1][1]
            self._saw(f"warm update, verify={verify!r}", report.verified == verify, report.transport,
                      report.received_bytes, seconds, limit=self._limit, stock=self._stock,
                      more={"first_ms": updates[0][0] * 1e3})  # fmt: skip
        seconds, report = self._stepped(self._sender, verify="full", staged=True)
        self._saw("staged update, verify='full'", report.verified == "full", report.transport,
                  report.received_bytes, seconds)  # fmt: skip

    def _asleep(self) -> None:
        """The engine releases its weights: an update is refused, and one after it has resumed brings all of them."""
        if self._device.type == "cpu":
            self._saw("asleep and awake", None, why="left out: SGLang's memory saver needs a GPU")
            return
        ours = self._digests()
        self._on_engine(lambda: self._engine.release_memory_occupation(["weights"]))
        refused = False
        try:
            self._update(self._sender)
        except ReshardError:
            refused = True
        self._on_engine(lambda: self._engine.resume_memory_occupation(["weights"]))
        seconds, report = self._update(self._sender)
        different = differing(self._digests(), ours)
        self._saw("asleep and awake: the update brings all weights back", refused and not different, report.transport,
                  report.received_bytes, seconds, why=", ".join(different[:3]))  # fmt: skip

    def _prefix_cache(self) -> None:
        """With flush_cache="by_version" nobody reads the cache of old weights, on a GPU or in host memory.

        Without a flush somebody does: there is something to read.
        """
        if not self._answers:
            return
        for flush_cache in ("by_version", False):
            self._stepped(self._sender, flush_cache=flush_cache)
            self._on_engine(lambda: self._engine.flush_cache())
            asked = _cached_prompts(int(self._version))
            for prompt in asked:
                self._on_engine(lambda prompt=prompt: _cached(self._engine, prompt))  # type: ignore[misc]
            before = self._on_engine(lambda: _cached(self._engine, asked[0]))  # noqa: B023
            self._stepped(self._sender, flush_cache=flush_cache)
            after = self._on_engine(lambda: _cached(self._engine, asked[0]))  # noqa: B023
            if self._engine is not None:
                right = before["all"] > 0 and (after["all"] > 0) == (flush_cache is False)
                if self._run.engine:  # the cache in host memory was to be read
                    right &= before["host"] > 0
                self._saw(f"prefix cache, flush_cache={flush_cache!r}", right,
                          more={"tokens_before": before["all"], "in_host_memory": before["host"],
                                "tokens_after": after["all"]})  # fmt: skip

    # -- what they are made of

    @property
    def _report(self) -> UpdateReport:
        assert self._last is not None, "the first part updates"
        return self._last

    def _saw(self, step: str, right: bool | None, route: str = "", nbytes: int = 0, seconds: float = 0.0,
             **more: Any) -> None:  # fmt: skip
        self._events.write(Row(self._run.name, step, right, route, nbytes, seconds, **more))

    def _has_time(self) -> bool:
        """The first trainer rank's clock decides for all."""
        late = torch.tensor(time.time() > self._ends_at)
        dist.broadcast(late, 0)
        return not bool(late)

    def _open(self, route: str) -> WeightSender:
        assert dist.group.WORLD is not None
        if self._url:
            return WeightSender(self._url, dist.group.WORLD, api_key=self._key, admin_api_key=self._key,
                                transport=route, timeout_s=_TIMEOUT_S)  # fmt: skip
        send = self._engine.update_weights_distributed if self._engine is not None else None
        return WeightSender.over(dist.group.WORLD, send, transport=route, timeout_s=_TIMEOUT_S)

    @contextlib.contextmanager
    def _opened(self, route: str) -> Iterator[WeightSender]:
        if route == "auto":
            yield self._sender
            return
        with contextlib.closing(self._open(route)) as sender:
            yield sender

    def _update(self, sender: WeightSender, **options: Any) -> tuple[float, UpdateReport]:
        """Returns the seconds of the slowest trainer rank, and the report."""
        self._version += 1
        named, version = self._trainer.named(), str(self._version)
        partial = self._trainer.partial
        call = lambda: sender.update(named, weight_version=version, partial=partial, **options)  # noqa: E731
        seconds, self._last = self._timed(call)
        return seconds, self._last

    def _stepped(self, sender: WeightSender, **options: Any) -> tuple[float, UpdateReport]:
        self._trainer.step(self._version)
        return self._update(sender, **options)

    def _timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Returns the seconds of the slowest trainer rank, and the result on this one."""
        self._synchronize()
        dist.barrier()
        started = time.perf_counter()
        result = call()
        self._synchronize()
        seconds = torch.tensor(time.perf_counter() - started)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds), result

    def _median(self, call: Callable[[], Any], times: int = 5) -> float:
        return statistics.median([self._timed(call)[0] for _ in range(times + 1)][1:])

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _on_engine(self, call: Callable[[], Any]) -> Any:
        result = call() if self._engine is not None else None
        dist.barrier()
        return result

    def _digests(self) -> list[dict[str, str]]:
        found = self._on_engine(lambda: read_live_digests(self._engine, self._folder / "digests"))
        return found or []

    def _stock_load(self, checkpoint: Path) -> list[dict[str, str]]:
        self._on_engine(lambda: stock.load(self._engine, checkpoint))
        return self._digests()

    def _says(self) -> Said:
        """Returns what the engine says; nothing if it refuses, as it does on dummy weights."""
        found: Said = []
        if self._engine is not None:
            with contextlib.suppress(ReshardError):
                found = said(self._engine, self._prompts)
        dist.barrier()
        return found


def _phases(report: UpdateReport) -> dict[str, float]:
    return {f"{phase}_ms": seconds * 1e3 for phase, seconds in report.seconds.items()}


def _cached_prompts(seed: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(5, 500, (_CACHED_PROMPTS, _CACHED_TOKENS), generator=numbers).tolist()
    return found


def _cached(engine: Any, prompt: list[int]) -> dict[str, int]:
    """Asks for an answer. Returns how many tokens of the prompt were in the cache, and in host memory."""
    answer = engine.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 4})["meta_info"]
    return {"all": answer["cached_tokens"], "host": (answer.get("cached_tokens_details") or {}).get("host", 0)}


def _pass_on(tensor: torch.Tensor) -> None:
    """Sends from the first trainer rank to the last one."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        dist.send(tensor, last)
    elif rank == last:
        dist.recv(tensor, 0)


def _backend(tensor: torch.Tensor) -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD._get_backend(tensor.device).name())


PARTS: dict[str, Callable[[Steps], None]] = {
    "first update": Steps._first_update,
    "bits": Steps._bits,
    "words": Steps._whole_words,
    "limits": Steps._limits,
    "SGLang's own update": Steps._own_update,
    "routes": Steps._routes,
    "verified": Steps._verified,
    "asleep": Steps._asleep,
    "prefix cache": Steps._prefix_cache,
}
