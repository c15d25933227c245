"""Sends updated weights from the trainer ranks to several engines at once, in one session with each.

    sender = MultiEngineSender(address, trainer_rank=rank, global_ranks=ranks)    # on every trainer rank
    sender.set_engines({"replica 0": send_0, "replica 1": send_1})                # trainer rank 0; None on others
    reports = sender.update(model.named_parameters(), weight_version="42")

All sessions share one control server, that of trainer rank 0's `Session.host`. Engines may join and leave between
updates.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any, Literal

import torch

from sglang_reshard._deprecated import renamed_keywords
from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.control import Address, ControlClient, WaitTimedOut
from sglang_reshard.errors import DeadlineExceeded, Mismatch, ReshardError, TornWeights, Unsupported
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import DEFAULT_TIMEOUT_S, decode, encode
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.coordinator import Send
from sglang_reshard.trainer.relay_requests import RelayRequests
from sglang_reshard.transports.memory import MemoryExporter

logger = get_logger(__name__)


class MultiEngineSender:
    """One trainer rank's end of the sessions with all engines.

    address       of the control server that trainer rank 0 hosts
    global_ranks  the rank of each trainer rank in torch.distributed's world
    relay         engines read from each other what one of them has read already, while it still reads: trainer memory
                  is read about once, however many engines there are. With transport="nixl" only
    options       transport, bucket_bytes and timeout_s, see `WeightSender`

    Raises Unsupported for relay=True with another transport.
    """

    def __init__(
        self,
        address: Address,
        *,
        trainer_rank: int,
        global_ranks: tuple[int, ...],
        relay: bool = False,
        **options: Any,
    ) -> None:
        if relay and options.get("transport") != "nixl":
            raise Unsupported(f"relay=True needs transport='nixl', not {options.get('transport', 'auto')!r}")
        self._address, self._rank, self._global_ranks = address, trainer_rank, global_ranks
        self._options = options
        self._relays = RelayRequests(address, options.get("timeout_s", DEFAULT_TIMEOUT_S)) if relay else None
        self._senders: dict[str, WeightSender] = {}
        self._excluded: dict[str, str] = {}
        self._client: ControlClient | None = None
        self._memory = MemoryExporter(trainer_rank)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that the next update goes to."""
        return tuple(self._senders)

    @property
    def excluded(self) -> dict[str, str]:
        """Why each engine is left out that has failed in an update with on_failure="exclude"."""
        return dict(self._excluded)

    def set_engines(self, engines: Mapping[str, Send | None]) -> None:
        """Opens sessions with new engines, and ends those with engines that are not listed. Collective.

        engines  name -> function that sends a request to the engine, on trainer rank 0; None on the others. An engine
                 that was restarted needs a new name. Plans and connections of engines that remain are kept.
                 One that is excluded stays so until it was left out of a call
        """
        self._excluded = {name: why for name, why in self._excluded.items() if name in engines}
        for name in [known for known in self._senders if known not in engines]:
            self._senders.pop(name).close()
        for name, send in engines.items():
            if name not in self._senders and name not in self._excluded:
                self._senders[name] = self._sender(name, send)

    def attend(self, engines: Mapping[str, Send | None]) -> None:
        """Deprecated name of `set_engines`."""
        warnings.warn("attend is deprecated; use set_engines", DeprecationWarning, stacklevel=2)
        self.set_engines(engines)

    @renamed_keywords(let_go="unmap_after")
    def update(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        *,
        on_failure: Literal["raise", "exclude"] = "raise",
        **options: Any,
    ) -> dict[str, UpdateReport]:
        """Updates all engines to these weights, and returns a report of each; see `WeightSender.update`. Collective.

        on_failure  "raise": see below. "exclude": an engine that fails has a report with success=False and the reason
                    as its message, and is left out of further updates, see `excluded`. It refuses requests if its
                    weights are torn, and otherwise serves those that it had; it can pull them from another engine

        Raises what the update of an engine raises, with the names of all engines that failed; TornWeights if any of
        them is torn. The other engines have the new weights then. With on_failure="exclude", only if all have failed.
        """
        if on_failure not in ("raise", "exclude"):
            raise Unsupported(f"on_failure={on_failure!r} is not supported; use 'raise' or 'exclude'")
        if not self._senders:
            raise Mismatch(f"trainer rank {self._rank}: there is no engine to update; call set_engines first")
        if self._relays is not None and options.get("staged"):
            raise Unsupported("staged=True is not supported with relay=True: engines pass on live weights")
        if not isinstance(named_tensors, (torch.nn.Module, Collection)):
            named_tensors = list(named_tensors)
        self._memory.begin_update()
        if self._relays is not None and self._rank == 0:
            self._relays.begin(self.engines)
        outcomes = self._outcomes(named_tensors, options)
        failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Exception)}
        reports = {name: report for name, report in outcomes.items() if isinstance(report, UpdateReport)}
        if on_failure == "exclude":
            reasons = self._reasons_of_all_ranks(failed)
            if len(reasons) < len(outcomes):
                self._exclude(reasons)
                version = options.get("weight_version")
                return reports | {name: UpdateReport.failed(why, version) for name, why in reasons.items()}
        if failed and len(outcomes) == 1:
            raise next(iter(failed.values()))
        if failed:
            raise _joint_error(failed, len(outcomes)) from next(iter(failed.values()))
        return reports

    def _outcomes(
        self, named_tensors: NamedTensors | torch.nn.Module, options: dict[str, Any]
    ) -> dict[str, UpdateReport | Exception]:
        """Updates all engines at the same time; their errors are returned."""
        gpu = runtime().current_device() if runtime().uses_gpu() else None

        def update(sender: WeightSender) -> UpdateReport | Exception:
            try:
                with nullcontext() if gpu is None else runtime().using(gpu):  # a new thread starts at GPU 0
                    return sender.update(named_tensors, **options)
            except Exception as error:
                return error

        if len(self._senders) == 1:
            ((name, sender),) = self._senders.items()
            return {name: update(sender)}
        with ThreadPoolExecutor(len(self._senders), "sglang-reshard engine") as threads:
            return dict(zip(self._senders, threads.map(update, self._senders.values()), strict=True))

    def _reasons_of_all_ranks(self, failed: Mapping[str, Exception]) -> dict[str, str]:
        """Returns why engines failed that failed on any trainer rank: all ranks must exclude the same ones."""
        timeout_s = float(self._options.get("timeout_s", DEFAULT_TIMEOUT_S))
        self._client = client = self._client or ControlClient(self._address.named("engines"), timeout_s)
        own = {name: f"{type(error).__name__}: {error}" for name, error in failed.items()}
        try:
            gathered = client.all_gather("failed", self._rank, len(self._global_ranks), encode(own), timeout_s)
        except WaitTimedOut as error:
            raise DeadlineExceeded(
                f"trainer ranks {list(error.missing)} did not say within {timeout_s:.0f} s which engines have failed; "
                "look at their logs"
            ) from None
        reasons: dict[str, str] = {}
        for data in gathered:  # the first rank's reason is the one that counts
            reasons = decode(data, dict[str, str]) | reasons
        return reasons

    def _exclude(self, reasons: Mapping[str, str]) -> None:
        for name, why in reasons.items():
            logger.warning("engine %s was not updated, and is left out from now on: %s", name, why)
            self._excluded[name] = why
            with suppress(ReshardError):  # a session that is broken has ended
                self._senders.pop(name).close()

    def release(self) -> None:
        """Drops views of the shards, see `WeightSender.release`."""
        for sender in self._senders.values():
            sender.release()

    def close(self) -> None:
        """Ends all sessions. Collective."""
        self.set_engines({})
        self._memory.close()
        if self._relays is not None and self._rank == 0:
            self._relays.close()
        if self._client is not None:
            self._client.close()

    def _sender(self, name: str, send: Send | None) -> WeightSender:
        timeout_s = self._options.get("timeout_s", DEFAULT_TIMEOUT_S)
        if self._relays is not None and send is not None:
            send = self._relays.through(name, send)
        return WeightSender.within(
            Session.join(self._address.named(name), timeout_s),
            trainer_rank=self._rank,
            global_ranks=self._global_ranks,
            send=send,
            shared_memory=self._memory,
            **self._options,
        )


def _joint_error(failed: Mapping[str, Exception], engines: int) -> Exception:
    """Returns one error for several: the type of the worst, and the messages of all."""
    errors = list(failed.values())
    worst = next((e for e in errors if isinstance(e, TornWeights)), errors[0])
    messages = "; ".join(f"{name}: {error}" for name, error in failed.items())
    kind = type(worst) if isinstance(worst, ReshardError) else ReshardError
    return kind(f"{len(failed)} of {engines} engines were not updated: {messages}")
