"""The one place where all ranks meet: a thread of trainer rank 0's process that all lines are connected to."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from sglang_reshard.control import protocol
from sglang_reshard.control.address import Address
from sglang_reshard.control.client_connection import ClientConnection
from sglang_reshard.control.framing import FrameTooLarge, ProtocolError
from sglang_reshard.control.limits import DEFAULT_STORED_BYTES, MemoryQuota, QuotaExceeded, TimerHeap, check_name
from sglang_reshard.control.pending_connection import PendingConnection
from sglang_reshard.control.rate_limited_log import RateLimitedLog
from sglang_reshard.control.sockets import listen, own, prepare
from sglang_reshard.control.store import SessionStore

logger = logging.getLogger(__name__)

_VISITORS, _VISIT_S, _VISIT_WHEN_FULL_S = 64, 5.0, 1.0
_ENDING_S = 5.0
_LONGEST_S = 3600.0
_Session = tuple[SessionStore, set[ClientConnection]]


class ControlServer:
    """Keeps the sessions of an address. Everything but `open` and `close` happens in its own thread."""

    def __init__(self, listener: socket.socket, key: bytes, stored_bytes: int) -> None:
        host, port = listener.getsockname()[:2]
        self.address = Address(secrets.token_hex(16), host, port, key.hex())
        self._key, self._listener = key, listener
        self._budget, self._deadlines, self._refusals = MemoryQuota(stored_bytes), TimerHeap(), RateLimitedLog()
        self._sessions: dict[str, _Session] = {}
        self._visitors: dict[PendingConnection, None] = {}  # the first is the oldest
        self._callers: set[ClientConnection] = set()
        self._unsent: set[ClientConnection] = set()
        self._broken: list[ClientConnection] = []
        self._selector = selectors.DefaultSelector()
        self._bell, self._doorstep = map(own, socket.socketpair())
        self._doorstep.setblocking(False)
        listener.setblocking(False)
        self._accepting = False
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="sglang-reshard hub", daemon=True)

    @classmethod
    def open(cls, interface: str = "127.0.0.1", stored_bytes: int = DEFAULT_STORED_BYTES) -> ControlServer:
        """Listen on `interface` only, an address of this host, on a free port. Raises OSError if it is not one.

        stored_bytes  that all sessions may hold together
        """
        hub = cls(listen(interface), secrets.token_bytes(32), stored_bytes)
        hub._thread.start()
        return hub

    def close(self) -> None:
        """Close the listener and all connections; all lines hear that the hub has gone."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._bell.close()

    # -- the thread

    def _serve(self) -> None:
        try:
            self._selector.register(self._doorstep, selectors.EVENT_READ, lambda _: None)
            while not self._closing:
                self._mind_the_door()
                for key, events in self._selector.select(self._patience()):
                    if key.fileobj.fileno() != -1:  # type: ignore[union-attr]  # closed by an event before this one
                        key.data(events)
                self._deadlines.expire(time.monotonic())
                self._bury()
        except Exception:
            logger.exception("the hub of this process's sessions broke; all ranks will hear that it has gone")
        finally:
            for end in (self._listener, self._doorstep, *(v.connection for v in self._visitors)):
                end.close()
            for caller in self._callers:
                caller.connection.close()
            self._selector.close()

    def _patience(self) -> float:
        """Seconds until something has to be done without anyone's asking."""
        now = time.monotonic()
        times = [now + _LONGEST_S]  # a selector cannot sleep for weeks
        times += [caller.ending for caller in self._unsent if caller.ending is not None]
        if self._visitors:
            times.append(next(iter(self._visitors)).since + self._visit_s())
        if (deadline := self._deadlines.next()) is not None:
            times.append(deadline)
        return max(0.0, min(times) - now)

    # -- visitors

    def _visit_s(self) -> float:
        return _VISIT_S if len(self._visitors) < _VISITORS else _VISIT_WHEN_FULL_S

    def _mind_the_door(self) -> None:
        """Turn away who takes too long to prove itself; let others wait outside while too many try."""
        now = time.monotonic()
        while self._visitors and (oldest := next(iter(self._visitors))).since + self._visit_s() <= now:
            self._refuse(oldest, "it did not prove in time that it knows the session's key")
        room = len(self._visitors) < _VISITORS
        if room and not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._accepting and not room:
            self._selector.unregister(self._listener)
        self._accepting = room

    def _accept(self, _: int) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError as error:
            self._refusals.log("somebody", str(error))
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it stays at the door until a file descriptor is free
                time.sleep(0.01)
            return
        own(connection).setblocking(False)
        prepare(connection)
        visitor = PendingConnection(connection, f"{peer[0]}:{peer[1]}", self._key, time.monotonic())
        self._visitors[visitor] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(visitor))

    def _hear(self, visitor: PendingConnection) -> None:
        try:
            directions = visitor.read()
        except BlockingIOError:
            return
        except (ProtocolError, OSError) as error:
            self._refuse(visitor, str(error))
            return
        if directions is not None:
            del self._visitors[visitor]
            caller = ClientConnection(visitor.connection, visitor.peer, *directions)
            self._callers.add(caller)
            self._listen_to(caller, selectors.EVENT_READ)

    def _refuse(self, visitor: PendingConnection, why: str) -> None:
        del self._visitors[visitor]
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        self._refusals.log(visitor.peer, why)

    # -- callers

    def _listen_to(self, caller: ClientConnection, events: int) -> None:
        self._selector.modify(caller.connection, events, lambda events: self._attend(caller, events))

    def _attend(self, caller: ClientConnection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(caller)
        if events & selectors.EVENT_READ and caller in self._callers:
            self._guarded(caller, lambda: self._read(caller))

    def _read(self, caller: ClientConnection) -> None:
        bodies = caller.read()
        if bodies is None:
            self._break(caller)
            return
        now = time.monotonic()
        for body in bodies:
            if caller.ending is None and caller in self._callers:
                self._take(caller, protocol.read_request(body), now)

    def _take(self, caller: ClientConnection, request: protocol.Request, now: float) -> None:
        if caller.session is None:
            self._admit(caller, request)
        elif isinstance(request, protocol.Hello):
            raise ProtocolError("it said a second hello")
        elif isinstance(request, protocol.EndSession):
            self._end(caller, caller.session, now)
            self._deliver(caller, protocol.Ok(request.number))
        else:
            self._sessions[caller.session][0].take(caller, request, now)

    def _admit(self, caller: ClientConnection, request: protocol.Request) -> None:
        if not isinstance(request, protocol.Hello):
            raise ProtocolError("its first word was no hello")
        try:
            check_name(request.session)
        except QuotaExceeded as error:
            self._deliver(caller, protocol.Refused(request.number, str(error)))
            return
        self._join(caller, request.session)
        self._deliver(caller, protocol.Ok(request.number))

    def _join(self, caller: ClientConnection, name: str) -> None:
        if name not in self._sessions:
            self._sessions[name] = (SessionStore(self._deliver, self._budget, self._deadlines), set())
        self._sessions[name][1].add(caller)
        caller.session = name

    def _end(self, caller: ClientConnection, name: str, now: float) -> None:
        board, callers = self._sessions.pop(name)
        board.end(caller)
        for other in callers - {caller}:
            other.session, other.ending = None, now + _ENDING_S
            self._deliver(other, protocol.SessionEnded())
        self._join(caller, name)

    # -- replies

    def _deliver(self, member: Any, reply: protocol.Reply | protocol.Event) -> None:
        """Never comes back to a board: who cannot be sent to is dropped later."""
        self._guarded(member, lambda: member.put(reply))
        if member not in self._unsent:
            self._flush(member)

    def _flush(self, caller: ClientConnection) -> None:
        self._guarded(caller, lambda: self._send(caller))

    def _send(self, caller: ClientConnection) -> None:
        if caller not in self._callers:
            return
        if not caller.flush():
            if caller not in self._unsent:
                self._unsent.add(caller)
                self._listen_to(caller, selectors.EVENT_READ | selectors.EVENT_WRITE)
        elif caller.ending is not None:
            self._break(caller)
        elif caller in self._unsent:
            self._unsent.discard(caller)
            self._listen_to(caller, selectors.EVENT_READ)

    # -- ends

    def _guarded(self, caller: ClientConnection, step: Callable[[], None]) -> None:
        """Whatever goes wrong with one connection is the end of that one only."""
        try:
            step()
        except BlockingIOError:
            pass
        except (ProtocolError, FrameTooLarge) as error:
            self._refusals.log(caller.peer, str(error))
            self._break(caller)
        except OSError:  # the other side's process has gone
            self._break(caller)
        except Exception:
            logger.exception("a request from %s broke", caller.peer)
            self._break(caller)

    def _break(self, caller: ClientConnection) -> None:
        if caller in self._callers:
            self._callers.discard(caller)
            self._unsent.discard(caller)
            self._selector.unregister(caller.connection)
            caller.connection.close()
            self._broken.append(caller)

    def _bury(self) -> None:
        """Let the sessions know whose connection broke, and who therefore breaks too."""
        now = time.monotonic()
        for caller in [c for c in self._unsent if c.ending is not None and c.ending <= now]:
            self._break(caller)
        while self._broken:
            caller = self._broken.pop()
            if caller.session is None:
                continue
            board, callers = self._sessions[caller.session]
            callers.discard(caller)
            board.gone(caller)
            if not callers and board.empty:
                del self._sessions[caller.session]
