"""The hub's end of a line: what it sent, and the replies it has not taken yet."""

from __future__ import annotations

import socket
from collections import deque

from sglang_reshard.control import protocol
from sglang_reshard.control.framing import MAX_FRAME_BYTES, FrameReader, FrameWriter, ProtocolError

MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES
_PIECE, _LARGEST_PIECE = 64 * 1024, 1024 * 1024
_WORD_BYTES = 512  # about what a word without values takes


class ClientConnection:
    """A connection that has proved itself. Never blocks.

    session  which it said in its first frame; None before that
    ending   when it is closed at the latest, because its session has ended
    """

    def __init__(self, connection: socket.socket, peer: str, sealer: FrameWriter, opener: FrameReader) -> None:
        self.connection, self.peer = connection, peer
        self.session: str | None = None
        self.ending: float | None = None
        self._sealer, self._opener = sealer, opener
        self._replies: deque[protocol.Reply | protocol.Event] = deque()
        self._unsent_bytes = 0
        self._frame = memoryview(b"")

    def read(self) -> list[memoryview] | None:
        """Bodies of the frames that have come, None at the end. Raises Unacceptable or OSError."""
        piece = self.connection.recv(min(max(self._opener.missing(), _PIECE), _LARGEST_PIECE))
        if piece:
            return self._opener.open(piece)
        if self._opener.broken_off:
            raise ProtocolError("it hung up within a frame")
        return None

    def put(self, reply: protocol.Reply | protocol.Event) -> None:
        """Send it when the connection takes it. Raises Unacceptable when too much has not been taken."""
        self._unsent_bytes += _size(reply)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            raise ProtocolError(f"it does not read its replies: {self._unsent_bytes} bytes wait for it")
        self._replies.append(reply)

    def flush(self) -> bool:
        """Send what the connection takes now. Whether that was all; raises OSError."""
        while self._frame or self._replies:
            if not self._frame:
                # Sealed at the last moment: until then many replies share the values that they carry.
                reply = self._replies.popleft()
                self._unsent_bytes -= _size(reply)
                self._frame = memoryview(self._sealer.seal(reply))
            try:
                sent = self.connection.send(self._frame)
            except BlockingIOError:
                return False
            self._frame = self._frame[sent:]
        return True


def _size(reply: protocol.Reply | protocol.Event) -> int:
    return _WORD_BYTES + (sum(map(len, reply.values)) if isinstance(reply, protocol.Values) else 0)
