"""Finds out whether the trainer of an update is there, before an engine stops serving for it.

An engine rank runs an update in the loop that also serves requests. It must not wait there for a trainer that has died,
hangs, or is not in this update at all. So one process of the engine asks the session first, while requests run.
"""

from __future__ import annotations

import threading

from sglang_reshard.control import Address, WaitTimedOut
from sglang_reshard.errors import Aborted, DeadlineExceeded, EngineRefused
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session, handles_key
from sglang_reshard.protocol.update_channel import update_scope

_KEPT = 8  # of the model's own weights, and of LoRA adapters


class TrainerPresence:
    """Keeps the connections to the sessions of the last updates, so that an unchanged update costs one message."""

    def __init__(self) -> None:
        self._sessions: dict[Address, Session] = {}  # that of the last update is the last one
        self._found: dict[Address, tuple[object, ...]] = {}  # what the trainer had published in its last update
        self._changing = threading.Lock()  # a call that was cancelled may still be connecting in another thread

    def find(self, request: DistributedUpdateWeightsReq) -> None:
        """Returns once the trainer ranks are in the update and have published the layout and their memory handles.

        Raises what `Session.join` does, EngineRefused if the trainer is not in the update, and DeadlineExceeded.
        """
        session = self._sessions.get(request.address)
        if session is None or session.client.is_lost:
            session = Session.join(request.address, request.timeout_s)
            self._keep(session)
        published = request.layout, request.handles
        known = self._found.get(request.address) == published
        handles = [handles_key(rank, digest) for rank, digest in enumerate(request.handles) if digest]
        try:
            keys = () if known else (request.layout, *handles)  # files of snapshots have no handles
            session.client.wait(keys, request.timeout_s, update_scope(request.update))
        except Aborted as error:
            raise EngineRefused(
                f"the trainer is not in {request.name()}: {error}. Call update on every trainer rank again"
            ) from error
        except WaitTimedOut:
            raise DeadlineExceeded(
                f"the trainer did not publish the source layout and memory handles of {request.name()} within "
                f"{request.timeout_s:.0f} s; look at the logs of the trainer ranks"
            ) from None
        self._found[request.address] = published

    def close(self) -> None:
        for session in self._sessions.values():
            session.client.close()

    def _keep(self, session: Session) -> None:
        """Keeps a session, and at most `_KEPT` in all. Dropping one ends its connection."""
        with self._changing:
            live = {address: one for address, one in self._sessions.items() if not one.client.is_lost}
            live.pop(session.address, None)
            self._sessions = dict([*live.items(), (session.address, session)][-_KEPT:])
            self._found = {address: self._found[address] for address in live if address in self._found}
