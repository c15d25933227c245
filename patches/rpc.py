"""sglang.srt.entrypoints.engine: a call of all schedulers that ends, which `Engine.collective_rpc` may not do.

Under dp-attention every attention group's leader listens on one socket, which hands a message to one of them,
the next in turn. Only the first leader passes it on to all; the others drop it, and SGLang waits for ever.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang_reshard.errors import DeadlineExceeded

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

_DEADLINE_S = 60.0


def call_schedulers(engine: Engine, method: str, **parameters: Any) -> str:
    """Call a method of all schedulers; what the first that failed said, or nothing."""
    from sglang.srt.managers.io_struct import RpcReqInput

    arguments = engine.server_args
    leaders = arguments.dp_size if arguments.enable_dp_attention else 1
    replies = ask(engine.send_to_rpc, RpcReqInput(method=method, parameters=parameters), leaders, _DEADLINE_S)
    return next((reply.message for reply in replies if not reply.success), "")


def ask(socket: Any, message: object, leaders: int, deadline_s: float) -> list[Any]:
    """Every leader's reply to a message that one of them passes on, whichever that is.

    Each is sent it once. All replies are awaited, so that none is left to be taken for that to a later call.
    """
    import zmq

    end = time.monotonic() + deadline_s
    replies: list[Any] = []

    def wait(event: int) -> None:
        if not socket.poll(max(0.0, end - time.monotonic()) * 1000, event):
            raise DeadlineExceeded(
                f"{len(replies)} of {leaders} schedulers answered within {deadline_s:g} s; look at the engine's log"
            )

    for _ in range(leaders):
        wait(zmq.POLLOUT)
        socket.send_pyobj(message)
    while len(replies) < leaders:
        wait(zmq.POLLIN)
        replies.append(socket.recv_pyobj())
    return replies
