"""Finds out whether the trainer of an update is there, before an engine stops serving for it.

An engine rank runs an update in the loop that also serves requests. It must not wait there for a trainer that has died,
hangs, or is not in this update at all. So one process of the engine asks the session first, while requests run.
"""

from __future__ import annotations

import threading

from sglang_reshard.control import WaitTimedOut
from sglang_reshard.errors import Aborted, DeadlineExceeded, EngineRefused
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.session import Session


class TrainerPresence:
    """Keeps the connection to the session of the last update, so that an unchanged update costs one message."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._found: tuple[object, ...] = ()  # what the trainer of the last update has published
        self._changing = threading.Lock()

    def find(self, request: DistributedUpdateWeightsReq) -> None:
        """Returns once the trainer ranks are in the update and have published the layout and their memory handles.

        Raises what `Session.join` does, EngineRefused if the trainer is not in the update, and DeadlineExceeded.
        """
        session = self._session
        if session is None or session.address != request.address or session.client.is_lost:
            session = Session.join(request.address, request.timeout_s)
            self._keep(session)
        published = request.address, request.layout, request.handles
        keys = () if self._found == published else session.published_keys(request.layout, request.handles)
        try:
            session.wait_in_update(request.update, keys, request.timeout_s)
        except Aborted as error:
            raise EngineRefused(
                f"the trainer is not in {request.name()}: {error}. Call update on every trainer rank again"
            ) from error
        except WaitTimedOut:
            raise DeadlineExceeded(
                f"the trainer did not publish the source layout and memory handles of {request.name()} within "
                f"{request.timeout_s:.0f} s; look at the logs of the trainer ranks"
            ) from None
        self._found = published

    def close(self) -> None:
        self._keep(None)

    def _keep(self, session: Session | None) -> None:
        with self._changing:  # a call that was cancelled may still be connecting in another thread
            former, self._session = self._session, session
        if former is not None:
            former.client.close()
