"""A connection to a hub that many threads ask over at once."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any

from sglang_reshard.control import protocol
from sglang_reshard.control.address import Address
from sglang_reshard.control.connect import connect
from sglang_reshard.control.framing import FrameTooLarge, ProtocolError
from sglang_reshard.errors import ConnectionLost, ReshardError

GRACE_S = 5.0  # that a hub may take longer to answer than the wait that it was asked for
STALL_S = 30.0  # that bytes may wait to be taken by the other side
_PIECE, _LARGEST_PIECE = 64 * 1024, 1024 * 1024


class _Call:
    """A request under way. `reply` stays None if the connection is lost."""

    __slots__ = ("answered", "reply")

    def __init__(self) -> None:
        self.answered = threading.Lock()
        self.answered.acquire()
        self.reply: protocol.Reply | None = None


class ControlConnection:
    """Requests to a hub and its replies to them, matched by number; a thread of its own reads."""

    def __init__(
        self,
        address: Address,
        timeout_s: float,
        on_abort: Callable[[str, str], None],
        on_loss: Callable[[str], None],
    ) -> None:
        """Raises what `connect` does.

        on_abort  hears scope and reason of what is aborted
        on_loss   hears once why the connection is of no use any more, unless it was closed on this side
        """
        self.address = address
        self._on_abort, self._on_loss = on_abort, on_loss
        self._socket, self._sealer, self._opener = connect(address, timeout_s)
        self._socket.settimeout(STALL_S)
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._lost: str | None = None
        self._state, self._sending = threading.Lock(), threading.Lock()
        self._reader = threading.Thread(target=self._read, name="sglang-reshard line", daemon=True)
        self._reader.start()

    def ask(self, kind: type[protocol.Request], *fields: Any, patience_s: float) -> protocol.Reply:
        """The hub's reply to `kind(number, *fields)`. Raises ConnectionLost, also when none comes in `patience_s`."""
        number, call = next(self._numbers), _Call()
        request = kind(number, *fields)
        with self._state:
            if self._lost is not None:
                raise self.error()
            self._calls[number] = call
        try:
            self._send(request)
            if not call.answered.acquire(timeout=min(patience_s, threading.TIMEOUT_MAX)):
                self.lose(f"it did not answer within {patience_s:g} s")
        finally:
            self._calls.pop(number, None)
        if call.reply is None:
            raise self.error()
        return call.reply

    def lose(self, why: str, told: bool = True) -> None:
        """Break the connection; all that wait fail. `told`: let `on_loss` know."""
        with self._state:
            if self._lost is not None:
                return
            self._lost = why
            calls = list(self._calls.values())
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closes it
        for call in calls:
            _release(call)
        if told:
            self._on_loss(str(self.error()))

    def close(self) -> None:
        """End this side; nobody hears of a loss."""
        self.lose("this line is closed", told=False)
        if threading.current_thread() is not self._reader:
            self._reader.join()

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def error(self) -> ConnectionLost:
        where = f"trainer rank 0's session at {self.address.host}:{self.address.port}"
        return ConnectionLost(f"{where} cannot be reached any more: {self._lost}")

    def _send(self, request: protocol.Request) -> None:
        with self._sending:
            try:
                frame = memoryview(self._sealer.seal(request))
            except FrameTooLarge as error:
                raise ReshardError(str(error)) from error
            try:
                while frame:
                    frame = frame[self._socket.send(frame) :]
            except OSError as error:
                self.lose(f"the connection broke while it was written to ({error}); look at the log of trainer rank 0")
            except BaseException:  # nothing after half a frame would be understood
                self.lose("this process was interrupted while it wrote to it")
                raise

    def _read(self) -> None:
        why = "the connection broke; has the process of trainer rank 0 ended? Look at its log"
        try:
            while self._lost is None:
                try:
                    piece = self._socket.recv(min(max(self._opener.missing(), _PIECE), _LARGEST_PIECE))
                except TimeoutError:  # nobody is asking
                    continue
                if not piece:
                    break
                for body in self._opener.open(piece):
                    self._hear(protocol.read_reply(body))
        except ProtocolError as error:
            why = f"what came is not from trainer rank 0: {error}"
        except OSError:
            pass
        finally:  # whatever happened: nobody else would answer those who wait
            self.lose(why)
            with self._sending:
                self._socket.close()

    def _hear(self, word: protocol.Reply | protocol.Event) -> None:
        if isinstance(word, protocol.ScopeAborted):
            self._on_abort(word.scope, word.reason)
        elif isinstance(word, protocol.SessionEnded):
            self.lose("the session was ended")
        elif (call := self._calls.pop(word.number, None)) is not None:
            call.reply = word
            _release(call)


def _release(call: _Call) -> None:
    with contextlib.suppress(RuntimeError):  # answered and lost at the same time
        call.answered.release()
