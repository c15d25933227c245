"""The control client: a rank's connection to the control server of its session, shared by all of its threads."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from sglang_reshard.control import protocol
from sglang_reshard.control.connection import LOOK_S, READ_BYTES, Address, connect, read_message, server_name, silence
from sglang_reshard.control.protocol import ProtocolError, QuotaExceeded
from sglang_reshard.errors import Aborted, ConnectionLost, DeadlineExceeded, ReshardError

GRACE_S = 5.0  # how much longer than the requested wait the server may take to reply
_CLOSE_S = 2.0


class WaitTimedOut(Exception):
    """A wait ended before everything arrived. An `Explain` turns it into an error that names ranks.

    missing  indices of the keys, or of the all-gather's members, that did not arrive
    """

    def __init__(self, missing: tuple[int, ...]) -> None:
        super().__init__(f"did not arrive in time: {missing}")
        self.missing = missing


Explain = Callable[[list[int]], str]  # of `WaitTimedOut.missing`: returns the message of DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a scope, by `ControlClient.revoke`.

    mark     what the members of an all-gather have marked it with; empty if it has no mark, and will get none
    reason   why it is cancelled; empty while it is not
    members  how many are in it
    """

    mark: str
    reason: str
    members: int


class ControlClient:
    """A connection to a control server. Any number of threads may wait at once. Its owner has to close it.

    Requests are executed in their order. Those without a result do not wait for the server, where nothing else is said:
    one that is refused ends the connection. Every method raises ConnectionLost once the server, the session or the
    connection has ended.
    """

    def __init__(self, address: Address, timeout_s: float, connect_s: float | None = None) -> None:
        """Connects within `connect_s`. Raises DeadlineExceeded if nothing answers, Unauthorized for a wrong key.

        connect_s  by default `timeout_s`
        timeout_s  also how long the server's process may be stopped, or hold its interpreter's lock: its kernel shows
                   that it is there, so that nothing but a deadline tells it from one that hangs
        """
        self.address = address
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._state, self._sending = threading.Lock(), threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, SimpleQueue[protocol.Reply | None]] = {}
        self._callbacks: dict[str, list[Callable[[str], None]]] = {}  # by scope
        self._lost: str | None = None
        self._closed = False
        self._kept_alive: list[object] = []
        self._socket, self._writer, self._reader = connect(address, timeout_s if connect_s is None else connect_s)
        self._socket.settimeout(self._timeout_s)
        self.local_address = str(self._socket.getsockname()[0])  # one of this host, on the way to the server's
        self._thread = threading.Thread(target=self._receive, name="sglang-reshard control client", daemon=True)
        self._thread.start()

    # -- keys

    def set(self, items: Mapping[str, bytes], *, wait: bool = True) -> None:
        """Sets keys. Unless it is to `wait`, values that are refused end the connection, and nothing is raised."""
        self._call("set", dict(items), wait=wait)

    def get(
        self, keys: Sequence[str], timeout_s: float, scope: str = "", explain: Explain | None = None
    ) -> list[bytes]:
        """Returns the keys' values, once all are set.

        Raises WaitTimedOut, DeadlineExceeded if there is an `explain`, or Aborted if `scope` is cancelled or no rank is
        in it.
        """
        return self._call("get", tuple(keys), timeout_s, scope, True, wait_s=timeout_s, explain=explain)

    def wait(self, keys: Sequence[str], timeout_s: float, scope: str = "") -> None:
        """Waits like `get`, without receiving the values."""
        self._call("get", tuple(keys), timeout_s, scope, False, wait_s=timeout_s)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return self._call("exists", tuple(keys))

    def add(self, key: str, n: int) -> int:
        """Adds to a counter, which starts at 0 and is stored as decimal digits. Returns its new value."""
        return self._call("add", key, n)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets `key` if it holds `expected`, or is missing and `expected` is empty. Returns its value after that."""
        return self._call("compare_set", key, expected, desired)

    def append(self, name: str, data: bytes, once: str = "") -> None:
        """Sets the next of `name/0`, `name/1`, ... `name` itself holds their number.

        once  a key: nothing is set if it is set, and it is set otherwise
        """
        self._call("append", name, data, once)

    def delete_keys(self, keys: Sequence[str]) -> int:
        """Returns how many of the keys existed."""
        return self._call("delete_keys", tuple(keys))

    def delete_prefix(self, prefix: str) -> int:
        """Deletes all keys that begin with `prefix`. Returns their number."""
        return self._call("delete_prefix", prefix)

    def num_keys(self) -> int:
        """Returns the number of keys in this session."""
        return self._call("num_keys")

    def all_gather(
        self,
        name: str,
        index: int,
        size: int,
        data: bytes,
        timeout_s: float,
        scope: str = "",
        mark: str = "",
        explain: Explain | None = None,
    ) -> list[bytes]:
        """Returns the data of all `size` members in the order of their indices, once all have arrived.

        In that moment `scope` gets the `mark` that every member has passed, see `revoke`.

        Raises WaitTimedOut, or DeadlineExceeded if there is an `explain`, and then every member does: none has
        continued. Raises Aborted if `scope` is cancelled. The name can be used again after an all-gather that
        succeeded; one that timed out stays so until all members know.
        """
        arguments = name, index, size, data, timeout_s, scope, mark
        return self._call("all_gather", *arguments, wait_s=timeout_s, explain=explain)

    # -- scopes

    def enter(self, scope: str, who: str, within: str = "") -> None:
        """Becomes a member: until `leave`, the end of this connection cancels the scope.

        If the scope is cancelled already, or has ended, or has a mark, the next wait in it raises Aborted.

        Args:
            who: names this process in the reason, "engine rank 3 (host h, process 123)".
            within: a scope that must have members already.
        """
        self._call("enter", scope, who, within, wait=False)

    def leave(self, scope: str) -> None:
        with self._state:
            self._callbacks.pop(scope, None)
        self._call("leave", scope, wait=False)

    def cancel(self, scope: str, reason: str, *, wait: bool = True) -> None:
        """Makes all waits in the scope, now or later, raise Aborted(reason). The first reason stays.

        Scopes whose names begin with `scope` and a slash are in it, and are cancelled too.
        """
        self._call("cancel", scope, reason, wait=wait)

    def revoke(self, scope: str, reason: str) -> Standing:
        """Cancels a scope unless it has a mark, and returns which of the two it is: one excludes the other for ever.

        Raises Aborted if nothing is known of the scope, nor of one that it is in: the session may be another one.
        """
        mark, why, members = self._call("revoke", scope, reason)
        return Standing(mark.decode(), why.decode(), int(members))

    def end_scope(self, scope: str) -> None:
        """Ends a scope whose name ends with a number, and all of lower numbers: no rank can enter them afterwards.

        Those in it are cancelled unless they have a mark. Waits in the scope itself go on.
        """
        self._call("end_scope", scope, wait=False)

    def watch(self, scope: str, callback: Callable[[str], None]) -> None:
        """Calls `callback(reason)` once, in a new thread, when the scope is cancelled or the connection is lost.

        At once if either is so already; not after `leave`.
        """
        with self._state:
            if self._lost is None:
                self._callbacks.setdefault(scope, []).append(callback)
            elif not self._closed:
                _start(callback, str(self._error()))
        try:
            self._call("watch", scope, wait=False)
        except ConnectionLost:  # which `callback` is called for, unless this side closed the connection
            if self._closed:
                raise

    def unwatch(self, scope: str, callback: Callable[[str], None]) -> None:
        """Forgets a callback of `watch`; others of this scope stay. The server forgets it with the scope."""
        with self._state:
            callbacks = self._callbacks.get(scope, [])
            if callback in callbacks:
                callbacks.remove(callback)
            if not callbacks:
                self._callbacks.pop(scope, None)

    def delete_scope(self, scope: str) -> None:
        """Deletes the keys `scope/...`, and lets the server forget that the scope was cancelled, and its all-gathers
        that timed out.
        """
        self._call("delete_scope", scope, wait=False)

    # -- the end

    @property
    def is_lost(self) -> bool:
        """True once the server, the session or the connection has ended: every method raises ConnectionLost."""
        return self._lost is not None

    def end_session(self) -> None:
        """Deletes the keys of this session and disconnects its other clients."""
        self._call("end_session")

    def lose(self, why: str) -> None:
        """Ends the connection without waiting for the server: all waits raise ConnectionLost with this reason."""
        with self._state:
            if self._lost is not None:
                return
            self._lost = why
            pending = list(self._pending.values())
            callbacks, self._callbacks = self._callbacks, {}
        self._disconnect()
        for replies in pending:
            replies.put(None)
        for callback in itertools.chain.from_iterable(callbacks.values()):
            _start(callback, str(self._error()))

    def drop_with(self, owner: object) -> None:
        """Ends the connection when its owner is garbage-collected without having closed it."""
        weakref.finalize(owner, self._disconnect).atexit = False

    def _disconnect(self) -> None:
        """Takes no lock: garbage is collected anywhere."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the client's thread, which closes it

    def keep_alive(self, thing: object) -> None:
        """Holds a reference for as long as this client exists."""
        self._kept_alive.append(thing)

    def close(self) -> None:
        """Leaves all scopes and disconnects."""
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._callbacks = {}
        with contextlib.suppress(ConnectionLost):
            self._request("disconnect", (), _CLOSE_S)
        self.lose("this connection to the control server is closed")
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- requests

    def _call(
        self,
        operation: str,
        *arguments: Any,
        wait_s: float | None = None,
        explain: Explain | None = None,
        wait: bool = True,
    ) -> Any:
        """Returns the result of an operation. `wait_s`: how long the server itself may wait.

        wait  False for an operation that nobody waits for: its number is negative, and only a failure is replied to
        """
        if not wait:
            with self._state:
                self._check_not_lost()
            self._send((-next(self._numbers), operation, arguments))
            return None
        timeout_s = max(self._timeout_s, 0.0 if wait_s is None else max(wait_s, 0.0) + GRACE_S)
        reply = self._request(operation, arguments, timeout_s)
        if isinstance(reply, protocol.Result):
            return reply.value
        if isinstance(reply, protocol.TimedOut):
            if explain is not None:
                raise DeadlineExceeded(explain(list(reply.missing)))
            raise WaitTimedOut(reply.missing)
        if isinstance(reply, protocol.Cancelled):
            raise Aborted(reply.reason)
        raise ReshardError(f"{server_name(self.address)} refused `{operation}`: {reply.message}")

    def _request(self, operation: str, arguments: tuple[Any, ...], timeout_s: float) -> protocol.Reply:
        number, replies = next(self._numbers), SimpleQueue[protocol.Reply | None]()
        with self._state:
            self._check_not_lost()
            self._pending[number] = replies
        reply = None
        try:
            self._send((number, operation, arguments))
            reply = replies.get(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        except Empty:
            self.lose(f"it did not answer within {timeout_s:g} s")
        finally:
            self._pending.pop(number, None)
        if reply is None:
            raise self._error()
        return reply

    def _check_not_lost(self) -> None:
        if self._lost is not None:
            raise self._error()

    def _send(self, request: tuple[int, str, tuple[Any, ...]]) -> None:
        with self._sending:
            try:
                frame = memoryview(self._writer.frame(request))
            except QuotaExceeded as error:
                raise ReshardError(str(error)) from error
            try:
                while frame:
                    frame = frame[self._socket.send(frame) :]
            except OSError as error:
                self.lose(f"sending to it failed ({error}); check the log of trainer rank 0")
            except BaseException:  # the server would not understand what follows half a frame
                self.lose("this process was interrupted while sending to it")
                raise

    # -- replies and events, in the client's thread

    def _receive(self) -> None:
        arrived = select.poll()
        arrived.register(self._socket, select.POLLIN)
        why = "the connection ended; was the process of trainer rank 0 killed? Check its log"
        try:
            while self._lost is None:
                if not arrived.poll(LOOK_S * 1000):
                    if silent := silence(self._socket):
                        why = f"{silent}; is the network down?"
                        break
                    continue
                data = self._socket.recv(READ_BYTES)
                if not data:
                    break
                for body in self._reader.feed(data):
                    self._handle(read_message(body))
        except ProtocolError as error:
            why = f"it sent invalid data: {error}"
        except OSError:
            pass
        finally:  # in any case: nothing else would end the waits
            self.lose(why)
            with self._sending:
                self._socket.close()

    def _handle(self, message: protocol.Reply | protocol.Event) -> None:
        if isinstance(message, protocol.Event):
            if message.scope is None:
                self.lose(message.reason)
                return
            with self._state:
                callbacks = self._callbacks.pop(message.scope, [])
            for callback in callbacks:
                _start(callback, message.reason)
        elif message.number < 0:
            if isinstance(message, protocol.Refused):  # else it is Cancelled, as the next wait in the scope will be
                self.lose(f"it refused a request: {message.message}")
        elif (replies := self._pending.pop(message.number, None)) is not None:
            replies.put(message)

    def _error(self) -> ConnectionLost:
        return ConnectionLost(f"{server_name(self.address)} can no longer be reached: {self._lost}")


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Returns a callback for a client that lives longer than the method's object unless that ends it."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (alive := reference()) is not None:
            alive(*arguments)

    return call


def _start(callback: Callable[[str], None], reason: str) -> None:
    """In a separate thread, because it may wait and may use the client."""
    threading.Thread(target=callback, args=(reason,), name="sglang-reshard callback", daemon=True).start()
