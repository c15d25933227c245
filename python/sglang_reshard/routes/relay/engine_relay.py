"""Asks the engines of an update to pass on weights to each other. Runs on trainer rank 0 only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from sglang_reshard.errors import ReshardError
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, encode
from sglang_reshard.protocol.session import Session
from sglang_reshard.routes.relay.offers import Offer, Relay, make_offer

Send = Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]


class EngineRelay:
    """Adds to each engine's request what it needs to know of the others.

    Engines offer their memory to each other once for all updates. They repeat it under another prefix after an update
    with a failed engine, or an engine that did not get weights from another, and when engines have joined or left.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._engines: tuple[str, ...] = ()
        self._update = self._number = 0
        self._is_current = False

    def begin(self, session: Session, engines: Sequence[str]) -> None:
        """Begins an update of these engines. Deletes earlier offers if the engines have to repeat theirs."""
        self._update += 1
        if self._is_current and self._engines == tuple(engines):
            return
        if self._session is not None:
            with contextlib.suppress(ReshardError):  # the update reports it
                self._session.client.delete_prefix(f"{self._prefix}/")
        self._session, self._engines, self._is_current = session, tuple(engines), True
        self._number += 1

    def through(self, engine: str, send: Send) -> Send:
        """Returns a function that sends an engine's requests by `send`. It may be called in any thread."""

        def send_relayed(request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
            relay, output = self._relay(engine), None
            if relay is not None:
                request = msgspec.structs.replace(request, around=request.around | {"relay": encode(relay)})
            try:
                output = send(request)
                return output
            finally:
                if output is None or not output.success:
                    self._is_current = False
                    if relay is not None:
                        self._withdraw(relay)
                elif output.detour:
                    self._is_current = False

        return send_relayed

    def _relay(self, engine: str) -> Relay | None:
        if len(self._engines) < 2:
            return None
        return Relay(self._prefix, self._engines, self._engines.index(engine), self._update)

    def _withdraw(self, relay: Relay) -> None:
        """Lets the other engines know at once that this one offers nothing, in case it has not yet."""
        assert self._session is not None, "begun"
        with contextlib.suppress(ReshardError):
            make_offer(self._session, relay, relay.own, Offer(error="its update failed"))

    @property
    def _prefix(self) -> str:
        return f"relay/{self._number}"
