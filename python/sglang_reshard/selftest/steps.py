"""What one run does, on every trainer rank in step. What is seen is judged by what this package did not write.

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

from sglang_reshard import UpdateReport, WeightSender
from sglang_reshard.errors import ReshardError
from sglang_reshard.selftest import stock
from sglang_reshard.selftest.digests import differing, read_live_digests
from sglang_reshard.selftest.events import EventWriter, Row
from sglang_reshard.selftest.job import Job
from sglang_reshard.selftest.reference import Said, distance
from sglang_reshard.selftest.trainer import Trainer

WARM_UPDATES = 5
NEW_TOKENS = 12
_TIMEOUT_S = 120.0
# What float32 on several ranks may differ from one rank's by, and what bfloat16 may from float32.
_MOST_APART = {"float32": 1e-3, "bfloat16": 0.5}


class Steps:
    """The steps of one run; `engine` is None on all trainer ranks but the first."""

    def __init__(self, job: Job, trainer: Trainer, engine: Any, device: torch.device, prompts: list[list[int]]) -> None:
        self._run, self._folder, self._ends_at = job.run, Path(job.folder), job.ends_at
        self._trainer, self._engine, self._device, self._prompts = trainer, engine, device, prompts
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
        before = self._says()
        self._step()
        with self._events.phase(f"first update, {self._run.source} -> {self._run.target}") as notes:
            seconds, report = self._update(self._sender)
            notes.append(f"{report.transport}, {report.received_bytes / 1e6:.1f} MB")
        changed = self._engine is None or self._says() != before
        self._saw("first update", changed, report.transport, report.received_bytes, seconds,
                  why="" if changed else "the engine says what it said before the update")  # fmt: skip

    def _bits(self) -> None:
        self._step()
        self._update(self._sender)
        ours, folder = self._digests(), self._folder / "checkpoint"
        self._trainer.save_checkpoint(folder)
        said = self._says()
        self._words(folder, said)
        self._step()
        self._update(self._sender)
        between = self._digests()  # a load that does nothing would be noticed
        with self._events.phase("SGLang loads the trainer's checkpoint"):
            loaded = self._stock_load(folder)
        different = differing(ours, loaded)
        right = bool(ours) and not different and between != loaded
        self._saw("every tensor, as SGLang's own load leaves it", right, why=", ".join(different[:3]),
                  more={"tensors": sum(map(len, ours)), "engine_ranks": len(ours), "different": len(different)})  # fmt: skip

    def _words(self, checkpoint: Path, said: Said) -> None:
        if self._engine is not None:
            with self._events.phase("transformers reads the same checkpoint"):
                apart = distance(checkpoint, self._prompts, said, self._device)
            tokens = sum(map(len, said))
            most = _MOST_APART[self._run.dtype]
            right = apart.largest < most and apart.agreed >= tokens * (1.0 if most < 0.01 else 0.75)
            why = "" if right else f"the largest difference is {apart.largest:.3g}, more than {most}"
            self._saw("log-probabilities, as transformers has them", right, why=why,
                      more={"largest_difference": apart.largest, "same_tokens": apart.agreed, "tokens": tokens})  # fmt: skip
        dist.barrier()

    def _limits(self) -> None:
        """One copy on a device of what one engine rank receives, and one between two trainer ranks."""
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
            sender, name = self._sender, f"warm update, {route}"
            try:
                with self._events.phase(name), self._opened(route) as sender:
                    updates = [self._stepped(sender) for _ in range(WARM_UPDATES + 1)]
            except ReshardError as error:  # the same on all trainer ranks
                self._saw(name, None if type(error).__name__ == "Unsupported" else False, route, why=str(error))
                continue
            seconds, report = statistics.median(s for s, _ in updates[1:]), updates[-1][1]
            self._saw(name, True, report.transport, report.received_bytes, seconds, limit=self._limit,
                      stock=self._stock, more={f"{k}_ms": v * 1e3 for k, v in report.seconds.items()})  # fmt: skip

    def _verified(self) -> None:
        seconds, report = self._stepped(self._sender, verify="full", staged=True)
        self._saw("staged update with every element compared", report.verified == "full", report.transport,
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
        send = self._engine.update_weights_distributed if self._engine is not None else None
        assert dist.group.WORLD is not None
        return WeightSender.over(dist.group.WORLD, send, transport=route, timeout_s=_TIMEOUT_S)

    @contextlib.contextmanager
    def _opened(self, route: str) -> Iterator[WeightSender]:
        if route == "auto":
            yield self._sender
            return
        with contextlib.closing(self._open(route)) as sender:
            yield sender

    def _step(self) -> None:
        rows = torch.randint(1, self._trainer.vocabulary, (4, 24), generator=torch.Generator().manual_seed(self._version))
        self._trainer.step(rows)

    def _update(self, sender: WeightSender, **options: Any) -> tuple[float, UpdateReport]:
        """Returns the seconds of the slowest trainer rank, and the report."""
        self._version += 1
        named, version = self._trainer.named(), str(self._version)
        partial = self._trainer.partial
        call = lambda: sender.update(named, weight_version=version, partial=partial, **options)  # noqa: E731
        seconds, self._last = self._timed(call)
        return seconds, self._last

    def _stepped(self, sender: WeightSender, **options: Any) -> tuple[float, UpdateReport]:
        self._step()
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
        """Returns for each prompt the tokens that the engine chooses and their log-probabilities; none if it refuses."""
        return self._on_engine(lambda: _said(self._engine, self._prompts)) or []


def _said(engine: Any, prompts: list[list[int]]) -> Said:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    try:
        engine.flush_cache()
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
    except ReshardError:  # it started on dummy weights, which it does not serve
        return []
    return [[(t, p) for p, t, *_ in output["meta_info"]["output_token_logprobs"]] for output in outputs]


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
    "limits": Steps._limits,
    "SGLang's own update": Steps._own_update,
    "routes": Steps._routes,
    "verified": Steps._verified,
    "asleep": Steps._asleep,
}
