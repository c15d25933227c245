"""Sends updated weights from the trainer ranks to several engines at once, in one session with all of them.

    sender = MultiEngineSender(address, trainer_rank=rank, global_ranks=ranks)    # on every trainer rank
    sender.set_engines({"replica 0": send_0, "replica 1": send_1})                # trainer rank 0; None on others
    reports = sender.update(model.named_parameters(), weight_version="42")

The control server is that of trainer rank 0's `Session.host`. Engines may join and leave between updates. The messages
of a trainer rank do not grow with the number of engines.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from sglang_reshard.api.around_updates import InBackground, Update, probed
from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch, ReshardError, TornWeights, Unsupported
from sglang_reshard.nearest import check_one_of
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes.relay.engine_relay import EngineRelay
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.coordinator import Send
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from sglang_reshard.trainer.publisher import Weights
from sglang_reshard.trainer.update_sender import UpdateSender

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sglang_reshard.api.given import SenderGiven, UpdateGiven
    from sglang_reshard.extras.asynchronous.background import UpdateHandle
    from sglang_reshard.extras.probe.probe import Probe

logger = get_logger(__name__)
_SESSION = "engines"


class MultiEngineSender(InBackground):
    """One trainer rank's end of the session with all engines.

    address       of the control server that trainer rank 0 hosts
    global_ranks  the rank of each trainer rank in torch.distributed's world
    relay         engines read from each other what one of them has read already, while it still reads: trainer memory
                  is read about once, however many engines there are. With transport="nixl" only
    options, given   see `SenderOptions`

    Raises Unsupported for relay=True with another transport, and the errors of `SenderOptions`.
    """

    def __init__(
        self,
        address: Address,
        *,
        trainer_rank: int,
        global_ranks: tuple[int, ...],
        relay: bool = False,
        options: SenderOptions | None = None,
        **given: Unpack[SenderGiven],
    ) -> None:
        self._options = SenderOptions.of(options, given)
        if relay and self._options.transport != "nixl":
            raise Unsupported(f"relay=True needs transport='nixl', but transport is {self._options.transport!r}")
        self._address, self._rank, self._global_ranks = address.named(_SESSION), trainer_rank, global_ranks
        self._relays = EngineRelay() if relay else None
        self._engines: dict[str, tuple[int, Send | None]] = {}  # with their numbers in the session
        self._excluded: dict[str, str] = {}
        self._numbers = itertools.count()
        self._sender: UpdateSender | None = None

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that the next update goes to."""
        return tuple(self._engines)

    @property
    def excluded(self) -> dict[str, str]:
        """Engine name -> the error of its failed update with on_failure="exclude"."""
        return dict(self._excluded)

    def set_engines(self, engines: Mapping[str, Send | None]) -> None:
        """Sets the engines of further updates, and ends the session for those that are not listed. Collective.

        engines  name -> function that sends a request to the engine, on trainer rank 0; None on the others. An engine
                 that was restarted needs a new name. Plans and connections of engines that remain are kept.
                 One that is excluded stays so until it was left out of a call
        """
        self._excluded = {name: why for name, why in self._excluded.items() if name in engines}
        wanted = [name for name in engines if name not in self._excluded]
        known = self._engines
        for name in sorted(set(wanted) - known.keys()):  # the same order on all trainer ranks
            known[name] = next(self._numbers), engines[name]
        self._use({name: known[name] for name in wanted})

    def _use(self, engines: dict[str, tuple[int, Send | None]]) -> None:
        self._engines = engines
        if self._sender is None:
            if not engines:
                return
            session = Session.join(self._address, self._options.timeout_s)
            self._sender = UpdateSender(session, self._rank, self._global_ranks, self._options)
        self._sender.set_engines({number: self._relayed(name, send) for name, (number, send) in engines.items()})

    def _relayed(self, engine: str, send: Send | None) -> Send | None:
        return send if self._relays is None or send is None else self._relays.through(engine, send)

    def update(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        options: UpdateOptions | None = None,
        *,
        on_failure: Literal["raise", "exclude"] = "raise",
        probe: Probe | None = None,
        **given: Unpack[UpdateGiven],
    ) -> dict[str, UpdateReport]:
        """Updates all engines to these weights, and returns a report of each; see `WeightSender.update`. Collective.

        on_failure  "raise": see below. "exclude": an engine that fails has a report with success=False and the reason
                    as its message, and is excluded from further updates, see `excluded`. It refuses requests if its
                    weights are torn, and otherwise serves its old weights, unless the reason says that all its ranks
                    had already written; it can pull from another engine
        probe       of all updated engines. An engine that differs is not excluded

        Raises the error of an engine's update, with the names of all engines that failed; TornWeights if any of them is
        torn. The other engines have the new weights. With on_failure="exclude", only if all have failed.
        """
        chosen = self._checked(on_failure, UpdateOptions.of(options, given, named_tensors))
        weights, update = self._probed(probe, named_tensors, chosen, on_failure)
        return update(weights)

    def update_async(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        options: UpdateOptions | None = None,
        *,
        on_failure: Literal["raise", "exclude"] = "raise",
        latest_only: bool = False,
        shadow_device: torch.device | None = None,
        probe: Probe | None = None,
        **given: Unpack[UpdateGiven],
    ) -> UpdateHandle[dict[str, UpdateReport]]:
        """Updates all engines from a copy of the shards, while the trainer continues; see `WeightSender.update_async`.

        Engines must not be set while it runs: `wait_for_background` first.
        """
        chosen = self._checked(on_failure, UpdateOptions.of(options, given, named_tensors))
        of_copy = dataclasses.replace(chosen, unmap_after=False)
        weights, update = self._probed(probe, named_tensors, of_copy, on_failure)
        return self.background.start(
            self.participant, update, weights, chosen, latest_only=latest_only, shadow_device=shadow_device
        )

    def wait_for_background(self) -> None:
        """Returns once no update runs in the background. The handle raises the error of a failed update."""
        if "background" in vars(self):
            self.background.wait()

    @property
    def participant(self) -> UpdateSender:
        """The `UpdateSender` that takes part in the session with all engines. Raises Mismatch before `set_engines`."""
        if self._sender is None:
            raise Mismatch(f"trainer rank {self._rank}: there is no session yet; call set_engines first")
        return self._sender

    def _checked(self, on_failure: str, options: UpdateOptions) -> UpdateOptions:
        check_one_of("on_failure", on_failure, ("raise", "exclude"))
        if self._sender is None or not self._engines:
            raise Mismatch(
                f"trainer rank {self._rank}: no engines are set; call set_engines with at least one engine first"
            )
        if self._relays is not None and options.staged:
            raise Unsupported(
                "staged=True is not supported with relay=True: engines read each other's live weights, and staged "
                "weights are not live; leave one of the two out"
            )
        return options

    def _probed(
        self,
        probe: Probe | None,
        weights: NamedTensors | torch.nn.Module,
        options: UpdateOptions,
        on_failure: Literal["raise", "exclude"],
    ) -> tuple[Any, Update]:
        update = functools.partial(self._update_engines, options=options, on_failure=on_failure)
        return probed(probe, self.participant, {n: send for n, (_, send) in self._engines.items()}, weights, update)

    def _update_engines(
        self,
        weights: Weights,
        options: UpdateOptions,
        on_failure: Literal["raise", "exclude"],
    ) -> dict[str, UpdateReport]:
        if self._relays is not None and self._rank == 0:
            self._relays.begin(self.participant.session, self.engines)
        found = self.participant.update_engines(weights, options)
        outcomes = {name: found[number] for name, (number, _) in self._engines.items()}
        failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, ReshardError)}
        reports = {name: report for name, report in outcomes.items() if isinstance(report, UpdateReport)}
        if on_failure == "exclude" and reports:
            reasons = {name: f"{type(error).__name__}: {error}" for name, error in failed.items()}
            for name, why in reasons.items():
                logger.warning("engine %s was not updated and is excluded from further updates: %s", name, why)
            self._excluded |= reasons
            self._use({name: engine for name, engine in self._engines.items() if name not in reasons})
            left_out = {name: UpdateReport.failed(why, options.weight_version) for name, why in reasons.items()}
            return reports | left_out
        if failed and len(outcomes) == 1:
            raise next(iter(failed.values()))
        if failed:
            raise _joint_error(failed, len(outcomes)) from next(iter(failed.values()))
        return reports

    def release(self) -> None:
        """Drops views of the shards, and the copy of `update_async`, see `WeightSender.release`."""
        self._release_background()
        if self._sender is not None:
            self._sender.release()

    def close(self) -> None:
        """Ends the session. Collective."""
        self._release_background()
        if self._sender is not None:
            self._sender.close()


def _joint_error(failed: Mapping[str, ReshardError], engines: int) -> ReshardError:
    """Returns one error for several: the type of the worst, and the messages of all."""
    errors = list(failed.values())
    worst = next((e for e in errors if isinstance(e, TornWeights)), errors[0])
    messages = "; ".join(f"{name}: {error}" for name, error in failed.items())
    return type(worst)(f"{len(failed)} of {engines} engines were not updated: {messages}")
