"""Several engines that take the same weights: one session with each, all updated at the same time.

    fleet = Fleet(address, trainer_rank=rank, global_ranks=ranks)      # on every trainer rank
    fleet.attend({"replica 0": send_0, "replica 1": send_1})           # `send`s on trainer rank 0, None on others
    reports = fleet.update(model.named_parameters(), weight_version="42")

All sessions share the hub of trainer rank 0's `Session.host`. Engines come and go between updates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from sglang_reshard.api.weight_sender import WeightSender
from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch, ReshardError, TornWeights
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import DEFAULT_TIMEOUT_S
from sglang_reshard.protocol.session import Session
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.coordinator import Send


class MultiEngineSender:
    """One trainer rank's end of the sessions with all engines.

    address       of the hub that trainer rank 0 hosts for all of them
    global_ranks  the global rank of each trainer rank
    options       transport, bucket_bytes and timeout_s, see `WeightSender`
    """

    def __init__(self, address: Address, *, trainer_rank: int, global_ranks: tuple[int, ...], **options: Any) -> None:
        self._address, self._rank, self._global_ranks = address, trainer_rank, global_ranks
        self._options = options
        self._senders: dict[str, WeightSender] = {}

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self._senders)

    def attend(self, engines: Mapping[str, Send | None]) -> None:
        """These engines, and no others, from now on. Every trainer rank calls it, with the same names.

        A name stands for one life of an engine: one that was started anew needs another. What is kept for an engine
        that stays (plan, handles, connections) is kept.
        """
        for name in [known for known in self._senders if known not in engines]:
            self._senders.pop(name).close()
        for name, send in engines.items():
            if name not in self._senders:
                self._senders[name] = self._sender(name, send)

    def update(self, named_tensors: NamedTensors | torch.nn.Module, **options: Any) -> dict[str, UpdateReport]:
        """Bring all engines to these weights; see `WeightSender.update`. A report of each.

        Raises what the update of an engine raises, naming all engines that failed. The others have the new weights
        then; TornWeights if any engine's are torn.
        """
        if not self._senders:
            raise Mismatch(f"trainer rank {self._rank}: there is no engine to update; attend to one first")
        if not isinstance(named_tensors, (torch.nn.Module, Collection)):
            named_tensors = list(named_tensors)
        if len(self._senders) == 1:
            ((name, sender),) = self._senders.items()
            return {name: sender.update(named_tensors, **options)}
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def update(sender: WeightSender) -> UpdateReport | Exception:
            if gpu is not None:
                torch.cuda.set_device(gpu)  # a thread begins at GPU 0
            try:
                return sender.update(named_tensors, **options)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self._senders), "sglang-reshard fleet") as threads:
            outcomes = dict(zip(self._senders, threads.map(update, self._senders.values()), strict=True))
        failed = {name: error for name, error in outcomes.items() if isinstance(error, Exception)}
        if failed:
            raise _together(failed, len(outcomes)) from next(iter(failed.values()))
        return {name: report for name, report in outcomes.items() if isinstance(report, UpdateReport)}

    def release(self) -> None:
        """Let go of the shards' memory on this side, see `WeightSender.release`."""
        for sender in self._senders.values():
            sender.release()

    def close(self) -> None:
        """End all sessions. Every trainer rank calls it."""
        self.attend({})

    def _sender(self, name: str, send: Send | None) -> WeightSender:
        timeout_s = self._options.get("timeout_s", DEFAULT_TIMEOUT_S)
        return WeightSender.within(
            Session.join(self._address.named(name), timeout_s),
            trainer_rank=self._rank,
            global_ranks=self._global_ranks,
            send=send,
            **self._options,
        )


def _together(failed: Mapping[str, Exception], engines: int) -> Exception:
    """One error for several engines': the kind of the worst, the words of all."""
    errors = list(failed.values())
    worst = next((e for e in errors if isinstance(e, TornWeights)), errors[0])
    said = "; ".join(f"{name}: {error}" for name, error in failed.items())
    kind = type(worst) if isinstance(worst, ReshardError) else ReshardError
    return kind(f"{len(failed)} of {engines} engines were not updated: {said}")
