"""Asks the engines of an update to pass on weights to each other. Runs on trainer rank 0 only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from sglang_reshard.control import Address, ControlClient
from sglang_reshard.errors import ReshardError
from sglang_reshard.protocol.messages import DistributedUpdateWeightsOutput, DistributedUpdateWeightsReq, encode
from sglang_reshard.routes.relay.offers import Offer, Relay, RelayOffers

Send = Callable[[DistributedUpdateWeightsReq], DistributedUpdateWeightsOutput]


class EngineRelay:
    """Adds to each engine's request what it needs to know of the others.

    Engines offer their memory to each other once for all updates, in a session of the control server. They repeat it in
    a new session after an update with a failed engine, or an engine that did not get weights from another, and when
    engines have joined or left.
    """

    def __init__(self, address: Address, timeout_s: float) -> None:
        """`address`: of the session that the requests name."""
        self._address, self._timeout_s = address, timeout_s
        self._engines: tuple[str, ...] = ()
        self._update = self._session = 0
        self._is_current = False

    def begin(self, engines: Sequence[str]) -> None:
        """Begins an update of these engines."""
        self._update += 1
        if self._is_current and self._engines == tuple(engines):
            return
        self.close()
        self._engines, self._is_current = tuple(engines), True
        self._session += 1

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

    def close(self) -> None:
        """Deletes the offers of earlier updates."""
        if len(self._engines) > 1:
            with (
                contextlib.suppress(ReshardError),
                ControlClient(self._address.named(self._name), self._timeout_s) as client,
            ):
                client.end_session()
        self._engines = ()

    def _relay(self, engine: str) -> Relay | None:
        if len(self._engines) < 2:
            return None
        return Relay(self._name, self._engines, self._engines.index(engine), self._update)

    def _withdraw(self, relay: Relay) -> None:
        """Lets the other engines know at once that this one offers nothing, in case it has not yet."""
        with contextlib.suppress(ReshardError), RelayOffers(self._address, relay, self._timeout_s) as offers:
            offers.make(relay.own, Offer(error="its update failed"))

    @property
    def _name(self) -> str:
        return f"relay/{self._session}"
