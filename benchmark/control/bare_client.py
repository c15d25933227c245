"""A connection to a control server without a thread, so that one process can be a thousand ranks."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from sglang_reshard.control import Address, protocol
from sglang_reshard.control.connection import FrameReader, FrameWriter, connect, read_message

_CONNECT_S = 60.0


class BareClient(asyncio.Protocol):
    """Sends requests and awaits replies, as `ControlClient` does."""

    def __init__(self, writer: FrameWriter, reader: FrameReader) -> None:
        self._writer, self._reader = writer, reader
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._transport: Any = None

    @classmethod
    async def connect(cls, address: Address) -> BareClient:
        """Enters the session of `address`."""
        connection, writer, reader = connect(address, _CONNECT_S)
        connection.setblocking(False)
        client = cls(writer, reader)
        client._transport, _ = await asyncio.get_running_loop().create_connection(lambda: client, sock=connection)
        return client

    def data_received(self, data: bytes) -> None:
        for body in self._reader.feed(data):
            message = read_message(body)
            if not isinstance(message, protocol.Event):
                self._pending.pop(message.number).set_result(message)

    async def call(self, operation: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        reply = self._pending[number] = asyncio.get_running_loop().create_future()
        self._transport.write(memoryview(self._writer.frame((number, operation, arguments))))
        message = await reply
        assert isinstance(message, protocol.Result), f"{operation}: {message}"
        return message.value

    def post(self, operation: str, *arguments: Any) -> None:
        """Requests what nobody waits for; a reply to it would be a failure, and raises KeyError."""
        request = -next(self._numbers), operation, arguments
        self._transport.write(memoryview(self._writer.frame(request)))

    def close(self) -> None:
        self._transport.close()
