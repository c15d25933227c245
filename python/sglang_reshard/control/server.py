"""The control server: an asyncio event loop in a thread of trainer rank 0's process that every rank connects to."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any, cast

from sglang_reshard.control import protocol
from sglang_reshard.control.connection import (
    LOOK_S,
    MAGIC,
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    READ_BYTES,
    Address,
    FrameReader,
    FrameWriter,
    configure,
    directions,
    listen,
    proof,
    read_request,
    silence,
)
from sglang_reshard.control.protocol import Call, ProtocolError, QuotaExceeded, operation
from sglang_reshard.control.store import SessionStore, check_name, execute

logger = logging.getLogger(__name__)
refusals = logger.getChild("refusals")

_MAX_STORED_BYTES = 4 * 2**30  # of all sessions together
_MAX_NAMES = 1_000_000  # keys, scopes and all-gathers of all sessions
_NAME_BYTES = 256  # about what Python takes for an entry of a dictionary, without the characters of its key
MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
_MAX_HANDSHAKES, _HANDSHAKE_S, _HANDSHAKE_WHEN_FULL_S = 64, 5.0, 1.0
_FLUSH_S = 5.0  # for a client to take its replies after its session has ended
_LOG_EVERY_S = 1.0


class MemoryQuota:
    """Counts the bytes and names that all sessions of a control server hold together, including unfinished frames and
    unsent replies.
    """

    def __init__(self, recount: Callable[[], None]) -> None:
        """`recount` gives back what is no longer held. It is called before anything is refused."""
        self._max_bytes, self._max_names, self._recount = _MAX_STORED_BYTES, _MAX_NAMES, recount
        self.stored_bytes = self.names = 0

    def take(self, size: int, names: int = 0) -> None:
        """Accounts for `size` more bytes and `names` more names; negative numbers give back.

        Raises QuotaExceeded without taking anything.
        """
        size += names * _NAME_BYTES
        if size > 0 and self.stored_bytes + size > self._max_bytes:
            self._recount()
        full = ""
        if size > 0 and self.stored_bytes + size > self._max_bytes:
            full = f"{self._max_bytes} bytes for the layouts and memory handles"
        elif names > 0 and self.names + names > self._max_names:
            full = f"{self._max_names} names"
        if full:
            raise QuotaExceeded(
                f"the control server's store is full: its limit is {full} of all sessions. Close senders that are no "
                "longer used"
            )
        self.stored_bytes += size
        self.names += names


class _Connection(asyncio.BufferedProtocol):
    """An authenticated connection. `session`: named by its hello; None before, and once the session has ended."""

    def __init__(self, server: _Serving, peer: str, writer: FrameWriter, reader: FrameReader) -> None:
        self._server, self._writer, self._reader = server, writer, reader
        self.peer = peer
        self.session: str | None = None
        self._on_its_way = 0  # bytes of an unfinished frame and of unread replies, as the quota counts them

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)  # `resume_writing` is called when all has been sent
        self._server.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            bodies = self._reader.feed(self._server.buffer[:nbytes])
            if self._on_its_way or self._reader.unfinished_bytes:
                self.count()
            for body in bodies:
                if not self.transport.is_closing():
                    self._server.handle(self, *read_request(body))
        except ProtocolError as error:
            self._drop(str(error))
        except Exception:
            self._fail()

    def resume_writing(self) -> None:
        self.count(grown=False)

    def eof_received(self) -> None:
        if self._reader.unfinished_bytes:
            self._drop("it disconnected in the middle of a frame")
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.quota.take(-self._on_its_way)
        self._server.disconnected(self)

    def send(self, message: protocol.Reply | protocol.Event) -> None:
        """Never fails: a client that cannot be sent to is disconnected later."""
        if self.transport.is_closing():
            return
        try:
            self.transport.write(memoryview(self._writer.frame(message)))  # of which asyncio copies less
        except QuotaExceeded as error:
            self._drop(str(error))
        except Exception:
            self._fail()
        if (unsent := self.transport.get_write_buffer_size()) > MAX_UNSENT_BYTES:
            self._drop(f"it does not read its replies: {unsent} bytes could not be sent")
        elif unsent or self._on_its_way:
            self.count()

    def finish(self, message: protocol.Event) -> None:
        """Sends a last message and closes the connection, with or without it having been received."""
        self.session = None
        self.send(message)
        self.transport.close()
        asyncio.get_running_loop().call_later(_FLUSH_S, self.transport.abort)

    def drop_if_silent(self) -> None:
        """Ends the connection if the client's host has vanished."""
        with contextlib.suppress(OSError):  # it is being closed
            if why := silence(self.transport.get_extra_info("socket")):
                self._drop(why)

    def count(self, *, grown: bool = True) -> None:
        """Counts in the quota what this connection holds, and ends it if all of them together hold more than that.

        grown  False to give back only what is no longer held
        """
        held = self._reader.unfinished_bytes + self.transport.get_write_buffer_size()
        if self.transport.is_closing() or (held > self._on_its_way and not grown):
            return
        try:
            self._server.quota.take(held - self._on_its_way)
        except QuotaExceeded as error:
            self._drop(f"{error}; this client sends incomplete frames or does not read its replies")
        else:
            self._on_its_way = held

    def _drop(self, why: str) -> None:
        self._server.log_refusal(self.peer, why)
        self.transport.abort()

    def _fail(self) -> None:
        logger.exception("the control server failed while serving %s and closed its connection", self.peer)
        self.transport.abort()


class ControlServer:
    """Serves the sessions of one address, in a thread that ends when this is closed or dropped."""

    def __init__(self, serving: _Serving) -> None:
        self.address, self.connections, self.quota = serving.address, serving.connections, serving.quota
        self._handshakes, self._thread = serving.handshakes, serving.thread
        self._stop = weakref.finalize(self, serving.stop)
        self._stop.atexit = False  # then clients learn of the process's end, and not before

    @classmethod
    def open(cls, interface: str = "127.0.0.1") -> ControlServer:
        """Listens on a free port of `interface`, an address of this host. Raises what `connection.listen` does."""
        serving = _Serving(listen(interface), secrets.token_bytes(32))
        serving.start()
        return cls(serving)

    def close(self) -> None:
        """Closes the listener and all connections; every client is notified."""
        self._stop()
        self._thread.join()

    def clients(self, session: str) -> int:
        """Returns the number of connections to a session. Safe to call from any thread."""
        return sum(connection.session == session for connection in list(self.connections))


class _Serving:
    """The server's thread runs this, and refers to no `ControlServer`. A failing connection ends alone."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        host, port = listener.getsockname()[:2]
        self.address = Address(secrets.token_hex(16), host, port, key.hex())
        self.connections: set[_Connection] = set()
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._key, self._listener = key, listener
        self.quota = MemoryQuota(self._recount)
        self._stores: dict[str, SessionStore] = {}
        self.handshakes: dict[asyncio.Task[None], float] = {}  # when each began; the first is the oldest
        self._last_refusal, self._unlogged = float("-inf"), 0
        # Not `new_event_loop`, whose policy belongs to the application.
        self._loop = asyncio.SelectorEventLoop()
        self._accepting = self._loop.create_task(self._accept())
        self._watching = self._loop.create_task(self._watch())
        self.thread = threading.Thread(target=self._run, name="sglang-reshard control server", daemon=True)

    def start(self) -> None:
        self.thread.start()
        atexit.register(self._finish_sending)

    def stop(self) -> None:
        """Ends the thread. Waits for nothing, as garbage may be collected anywhere."""
        atexit.unregister(self._finish_sending)
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._accepting.cancel)

    def _finish_sending(self) -> None:
        """Waits until the server's thread has sent what it is sending.

        The process may end because one of its own clients has heard why an update was cancelled. The server's thread
        would stop between two clients, and the second would hear of a lost connection instead.
        """
        with contextlib.suppress(RuntimeError, futures.TimeoutError):  # its thread has ended, or does not come to it
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(_FLUSH_S)

    # -- operations

    @operation
    def hello(self, call: Call, session: str) -> None:
        """The first request of a connection."""
        check_name(session)
        connection = cast(_Connection, call.client)
        if connection.session is not None:
            raise ProtocolError("it sent a second hello")
        self._stores.setdefault(session, SessionStore(self.quota.take, self._loop.call_later))
        connection.session = session

    @operation
    def end_session(self, call: Call) -> None:
        """Deletes what the session holds, and disconnects its other clients, which learn who has asked for that."""
        asking = cast(_Connection, call.client)
        session, who = asking.session, self._stores[cast(str, asking.session)].who(asking) or asking.peer
        self._stores[cast(str, session)].end(call.client)
        for connection in self.connections - {call.client}:
            if connection.session == session:
                connection.finish(protocol.Event(None, f"{who} {protocol.ENDED}"))

    def handle(self, connection: _Connection, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Executes a request. Raises ProtocolError."""
        call = Call(connection, number)
        if name == "hello":
            execute(self, call, name, arguments)
        elif connection.session is None:
            raise ProtocolError("its first request was not hello")
        else:
            owner = self if name == "end_session" else self._stores[connection.session]
            execute(owner, call, name, arguments)

    def disconnected(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        if (session := connection.session) is None:
            return
        store = self._stores[session]
        store.disconnected(connection)
        if store.empty and not any(other.session == session for other in self.connections):
            del self._stores[session]

    def _recount(self) -> None:
        for connection in self.connections:
            connection.count(grown=False)

    def log_refusal(self, peer: str, why: str) -> None:
        """Logs at most one line a second: unauthenticated peers must not fill a disk."""
        if time.monotonic() - self._last_refusal < _LOG_EVERY_S:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more refusals were not logged)" if self._unlogged else ""
        self._last_refusal, self._unlogged = time.monotonic(), 0
        refusals.warning("the control server closed the connection from %s: %s%s", peer, why, more)

    # -- the server's thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._accepting)
        except asyncio.CancelledError:
            pass
        except Exception:
            logger.exception("the control server failed; every rank loses its connection to it")
        finally:
            self._listener.close()
            self._watching.cancel()
            self._loop.run_until_complete(self._close_all())
            self._loop.close()

    async def _close_all(self) -> None:
        for handshake in self.handshakes:
            handshake.cancel()
        await asyncio.gather(*self.handshakes, return_exceptions=True)
        for connection in self.connections:
            connection.transport.abort()
        await asyncio.sleep(0)  # for the sockets to be closed

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in list(self.connections):
                connection.drop_if_silent()

    async def _accept(self) -> None:
        """Starts handshakes, no more than _MAX_HANDSHAKES at a time: other peers wait outside."""
        self._listener.setblocking(False)
        while True:
            if len(self.handshakes) >= _MAX_HANDSHAKES:
                oldest, began = next(iter(self.handshakes.items()))
                left_s = max(0.0, began + _HANDSHAKE_WHEN_FULL_S - self._loop.time())
                done, _ = await asyncio.wait(self.handshakes, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    oldest.cancel()
                continue
            try:
                connection, peer = await self._loop.sock_accept(self._listener)
            except OSError as error:  # for want of a file descriptor, usually
                self.log_refusal("an unknown peer", str(error))
                await asyncio.sleep(0.01)
                continue
            handshake = self._loop.create_task(self._admit(configure(connection), f"{peer[0]}:{peer[1]}"))
            self.handshakes[handshake] = self._loop.time()
            handshake.add_done_callback(self.handshakes.pop)

    async def _admit(self, connection: socket.socket, peer: str) -> None:
        """Serves a peer that authenticates itself in time."""
        deadline = self._loop.call_later(_HANDSHAKE_S, cast(Any, asyncio.current_task()).cancel)
        try:
            frames = await self._handshake(connection)
            await self._loop.connect_accepted_socket(lambda: _Connection(self, peer, *frames), connection)
        except (ProtocolError, OSError, asyncio.CancelledError) as error:
            connection.close()
            if not self._accepting.done():
                self.log_refusal(peer, str(error) or "its handshake took too long")
        finally:
            deadline.cancel()

    async def _handshake(self, connection: socket.socket) -> tuple[FrameWriter, FrameReader]:
        """Never reads beyond the handshake, so that an unauthenticated peer costs no memory."""
        if (opening := await self._read(connection, len(MAGIC))) != MAGIC:
            raise ProtocolError(
                f"it uses another protocol, or another version of it: it opened with {opening!r}, and this server "
                f"expects {MAGIC!r}. If it is a rank of sglang-reshard, install the same version on both"
            )
        nonces = await self._read(connection, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        await self._loop.sock_sendall(connection, nonces[1] + proof(self._key, b"server", *nonces))
        if not hmac.compare_digest(await self._read(connection, PROOF_BYTES), proof(self._key, b"client", *nonces)):
            raise ProtocolError("it does not have the session's key")
        return directions(self._key, b"server", b"client", *nonces)

    async def _read(self, connection: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (piece := await self._loop.sock_recv(connection, size - len(data)))
            if not piece:
                raise ProtocolError("it disconnected during the handshake")
        return data
