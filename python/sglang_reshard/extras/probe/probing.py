"""Runs the probe of one update on all trainer ranks: the trainer's numbers before it, the engines' after it."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from sglang_reshard import tasks
from sglang_reshard.errors import DeadlineExceeded, ProbeMismatch, ReshardError
from sglang_reshard.extras.probe.engine import Expected, NotProbed, ProbedEngine
from sglang_reshard.extras.probe.probe import Probe
from sglang_reshard.extras.probe.trainer import trainer_logprobs
from sglang_reshard.observability.logs import get_logger, log_context
from sglang_reshard.observability.probe_report import ProbedToken, ProbeReport
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import decode, encode
from sglang_reshard.trainer.update_sender import raising

if TYPE_CHECKING:
    from sglang_reshard.trainer.coordinator import Send
    from sglang_reshard.trainer.update_sender import UpdateSender

logger = get_logger(__name__)
_RECORD_S = 10.0  # metrics are not worth a longer wait
ByToken = Sequence[Sequence[float]]  # by sequence and position; the first position has none


class Probing:
    """One update's probe. `begin`, then the update, then `finish`, on every trainer rank."""

    def __init__(self, probe: Probe, sender: UpdateSender, engines: Mapping[str, Send | None]) -> None:
        """`engines`: name -> function that sends requests to the engine, on trainer rank 0; None on the others."""
        self._probe, self._sender, self._sends = probe, sender, dict(engines)
        self._timeout_s = probe.timeout_s or sender.timeout_s
        self._engines: dict[str, ProbedEngine] = {}
        self._trainer: tuple[tuple[float, ...], ...] = ()
        self._trainer_seconds = 0.0

    def begin(self, weights: Any) -> Any:
        """Computes the trainer's log-probabilities. Collective, as the module is. Returns what the update is to send.

        That is `weights`; if this rank has failed, an iterable that raises the reason, so that all ranks hear of it
        before anything is written.
        """
        rank, _ = self._sender.ranks
        began = time.perf_counter()
        try:
            if rank == 0:
                named = self._sends.items()
                self._engines = {n: ProbedEngine(self._probe.engine_named(n, send)) for n, send in named}
            self._trainer = trainer_logprobs(self._probe)
        except ReshardError as error:
            return raising(error)
        except Exception as error:
            what = f"trainer rank {rank}: the probe's logprobs function failed"
            logger.exception(what)
            return raising(ReshardError(f"{what}: {type(error).__name__}: {error}"))
        self._trainer_seconds = time.perf_counter() - began
        return weights

    def finish(self, reports: Mapping[str, UpdateReport]) -> dict[str, UpdateReport]:
        """Asks the updated engines, and returns their reports with the results. Collective.

        Raises ProbeMismatch on every rank, unless on_mismatch="warn", and DeadlineExceeded naming ranks that do not
        probe this update. The weights are already live.
        """
        rank, _ = self._sender.ranks
        asked = {  # all engines at the same time
            name: tasks.start(f"probe of {name}", functools.partial(self._probed, name, report))
            for name, report in reports.items()
            if rank == 0 and report.success
        }
        found = encode({name: probed.result() for name, probed in asked.items()})
        try:
            found = self._sender.agree(found, "update with probe=", self._timeout_s + self._sender.timeout_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"the update succeeded and the weights are live, but {error}") from None
        probes = decode(found, dict[str, ProbeReport])
        complete = dict(reports)
        for name, probe in probes.items():
            seconds = reports[name].seconds | {"probe": probe.seconds}
            complete[name] = msgspec.structs.replace(reports[name], probe=probe, seconds=seconds)
        if rank == 0:
            self._tell(probes)
        if self._probe.on_mismatch == "raise":
            _raise_mismatch(probes, complete)
        return complete

    def _probed(self, name: str, report: UpdateReport) -> ProbeReport:
        sequences, version = self._probe.token_ids(), report.weight_version
        session, update, lora = self._sender.last_update
        began = time.perf_counter()
        try:
            engine = self._engines[name].logprobs(sequences, Expected(session, update, version, lora), self._timeout_s)
        except NotProbed as error:
            seconds = self._trainer_seconds + time.perf_counter() - began
            return ProbeReport(version, str(error), trainer_seconds=self._trainer_seconds, seconds=seconds)
        found, worst = compare(sequences, self._trainer, engine)
        engine_seconds = time.perf_counter() - began
        return ProbeReport(
            weight_version=version,
            sequences=tuple(map(tuple, sequences)),
            trainer=self._trainer,
            engine=engine,
            tokens=found.tokens,
            mean_difference=found.mean,
            largest_difference=found.largest,
            worst=worst,
            mean_threshold=self._probe.mean_threshold,
            largest_threshold=self._probe.largest_threshold,
            trainer_seconds=self._trainer_seconds,
            engine_seconds=engine_seconds,
            seconds=self._trainer_seconds + engine_seconds,
        )

    def _tell(self, probes: Mapping[str, ProbeReport]) -> None:
        """Logs what was found, and adds it to the engines' metrics. Runs on trainer rank 0."""
        session, update, _ = self._sender.last_update
        for name, probe in probes.items():
            which = f"probe of update {update}" if len(probes) == 1 else f"probe of update {update}, engine {name}"
            log = logger.info if probe.passed else logger.warning
            with log_context(session=session, update=update, version=probe.weight_version or ""):
                log("%s: %s", which, probe.line())
                try:
                    self._engines[name].record(probe.summary(), min(_RECORD_S, self._timeout_s))
                except NotProbed as error:
                    logger.warning("%s could not be added to the engine's metrics: %s", which, error)


class Differences(NamedTuple):
    """|ours - theirs|: mean, maximum, the index of the maximum, and how many there are."""

    mean: float
    largest: float
    largest_at: int
    tokens: int


def differences(ours: torch.Tensor, theirs: torch.Tensor) -> Differences:
    """Compares log-probabilities: 1-D tensors of equal, positive length.

    Equal infinities do not differ. If one of two values is no number, their difference is infinite.
    """
    ours, theirs = ours.double(), theirs.double()
    found = (ours - theirs).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    found = torch.where(ours == theirs, 0.0, found)
    largest_at = int(found.argmax())
    return Differences(float(found.mean()), float(found[largest_at]), largest_at, found.numel())


def compare(
    sequences: Sequence[Sequence[int]], trainer: ByToken, engine: Sequence[ByToken]
) -> tuple[Differences, ProbedToken]:
    """Compares the trainer's numbers with those of each data parallel rank of an engine.

    Returns the token with the largest difference, too.
    """
    tokens = [
        ProbedToken(number, position, token, rank, ours[position - 1], of_rank[number][position - 1])
        for rank, of_rank in enumerate(engine)
        for number, (sequence, ours) in enumerate(zip(sequences, trainer, strict=True))
        for position, token in enumerate(sequence[1:], start=1)
    ]
    found = differences(*torch.tensor([(t.trainer, t.engine) for t in tokens], dtype=torch.float64).T)
    return found, tokens[found.largest_at]


def _raise_mismatch(probes: Mapping[str, ProbeReport], reports: Mapping[str, UpdateReport]) -> None:
    differing = {name: probe for name, probe in probes.items() if probe.outcome == "mismatch"}
    if not differing:
        return
    which = "; ".join(
        (f"{name}: " if len(probes) > 1 else "") + f"{probe.exceeded()}, over {probe.tokens} tokens; largest at "
        f"{probe.worst}"
        for name, probe in differing.items()
    )
    version = next(iter(differing.values())).weight_version
    raise ProbeMismatch(
        f"the engine computes something else than the trainer after the update to version {version!r}, whose weights "
        f"are live and serving: {which}. Repeat the update with verify='full'. If that succeeds, the weights are "
        "right, and the engine computes with a copy or a cache that no update writes, or with a configuration that "
        "differs from the trainer's module. If the difference is rounding, raise mean_threshold and "
        "largest_threshold. Until the cause is known, start the engine from a checkpoint of these weights",
        reports,
    )
