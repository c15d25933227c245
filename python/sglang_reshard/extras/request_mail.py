"""Carries update requests to receivers in other processes, and their answers back, over the session's control server.

A receiver asks for its next request when it is ready; until then the request waits on the server. The end of a
receiver's connection cancels its scope, so that nobody waits for it.

Frames are authenticated, not encrypted, so a request travels without the session's key. A receiver has proved that it
knows the key, and puts it back.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time

import msgspec

from sglang_reshard.control import Address, ControlClient, WaitTimedOut, weakly
from sglang_reshard.errors import Aborted, ConnectionLost, EngineRefused, Mismatch, ReshardError
from sglang_reshard.layout.decoders import from_json
from sglang_reshard.protocol.messages import (
    DistributedUpdateWeightsOutput,
    DistributedUpdateWeightsReq,
    decode,
    encode,
)

_SESSION, _RECEIVERS = "receivers", "names"
_WAIT_S = 60.0  # at a time: a wait without a limit is many of these


def to_metadata(address: Address) -> str:
    """Returns what a receiver needs to connect, as a line of text. Any process that has it can join, so keep it
    private.
    """
    return msgspec.json.encode(address).decode()


def from_metadata(metadata: str) -> Address:
    """Raises Mismatch for any text that `to_metadata` did not return."""
    try:
        return from_json(metadata, Address)
    except (msgspec.MsgspecError, TypeError) as error:
        raise Mismatch(
            f"this is not the metadata of a ModuleSender: {error}. Pass ModuleSender.metadata unchanged"
        ) from None


class Mailbox:
    """A receiver's end."""

    def __init__(self, address: Address, name: str, timeout_s: float) -> None:
        """Connects, and registers `name`, which no other receiver may have."""
        self._client = ControlClient(address.named(_SESSION), timeout_s)
        self._name, self._number, self._closed, self._key = name, 0, False, address.key
        self._client.drop_with(self)
        try:
            self._client.enter(_scope(name), f"receiver {name}")
            self._client.append(_RECEIVERS, name.encode())
        except BaseException:
            self._client.close()
            raise

    @property
    def is_lost(self) -> bool:
        """True once the sender has ended, or the connection to it: no further request will come."""
        return self._client.is_lost

    def request(self, timeout_s: float | None) -> DistributedUpdateWeightsReq | None:
        """Returns the next request; None if there is none within `timeout_s`, or if this is closed before.

        Raises Aborted if the sender says that there will be none, and ConnectionLost if it has ended.

        timeout_s  None to wait without a limit
        """
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            wait_s = min(max(end - time.monotonic(), 0.0), _WAIT_S)
            try:
                (data,) = self._client.get([_request(self._name, self._number)], wait_s, _scope(self._name))
                return _with_key(decode(data, DistributedUpdateWeightsReq), "", self._key)
            except WaitTimedOut:
                if time.monotonic() >= end:
                    return None
            except (Aborted, ConnectionLost):
                if self._closed:
                    return None
                raise

    def answer(self, output: DistributedUpdateWeightsOutput) -> None:
        """Answers the request that `request` returned last, unless this is closed."""
        try:
            self._client.set({_answer(self._name, self._number): encode(output)})
        except ConnectionLost:
            if not self._closed:
                raise
        self._number += 1

    def close(self) -> None:
        """Leaves: the sender no longer counts with this receiver. Ends a wait of another thread."""
        self._closed = True
        with contextlib.suppress(ReshardError):
            self._client.cancel(_scope(self._name), f"receiver {self._name} has left")
        self._client.close()


class MailRoom:
    """Trainer rank 0's end, for all receivers."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._client = ControlClient(address.named(_SESSION), timeout_s)
        self._timeout_s, self._key = timeout_s, address.key
        self._client.drop_with(self)
        self._sent: dict[str, int] = {}  # requests, by receiver
        self._gone: set[str] = set()

    def receivers(self) -> list[str]:
        """Returns the names of those that have registered and not left, in the order in which they came."""
        for number in range(len(self._sent), self._client.add(_RECEIVERS, 0)):
            (data,) = self._client.get([f"{_RECEIVERS}/{number}"], self._timeout_s)
            name = data.decode()
            self._sent[name] = 0
            self._client.watch(_scope(name), functools.partial(weakly(self._lost), name))
        return [name for name in self._sent if name not in self._gone]

    def _lost(self, name: str, _reason: str) -> None:
        self._gone.add(name)

    def wait(self, count: int, timeout_s: float) -> None:
        """Waits until `count` receivers have ever registered. Raises DeadlineExceeded."""
        self._client.get([f"{_RECEIVERS}/{number}" for number in range(count)], timeout_s, explain=lambda missing: (
            f"{count - len(missing)} of {count} receivers have registered within {timeout_s:.0f} s; do the others call "
            "init with this sender's metadata?"
        ))  # fmt: skip

    def send(self, name: str, request: DistributedUpdateWeightsReq) -> DistributedUpdateWeightsOutput:
        """Gives a receiver a request, and returns its answer once it was ready.

        Raises EngineRefused if the receiver is gone, and Mismatch for a request whose addresses have another key than
        this control server.
        """
        number = self._sent[name]
        self._sent[name] += 1
        keys = [_request(name, number), _answer(name, number)]
        try:
            self._client.set({keys[0]: encode(_with_key(request, self._key, ""))})
            (data,) = self._client.get(keys[1:], request.timeout_s, _scope(name), lambda _: (
                f"receiver {name} did not take the weights within {request.timeout_s:.0f} s. Does it call "
                "poll_and_apply, receive or start?"
            ))  # fmt: skip
        except Aborted as error:
            if self._client.exists(keys[1:]) != [True]:
                raise EngineRefused(str(error)) from None
            (data,) = self._client.get(keys[1:], request.timeout_s)  # it answered, and left before this was asked
        self._client.delete_keys(keys)
        return decode(data, DistributedUpdateWeightsOutput)

    def refuse(self, name: str, reason: str) -> None:
        """Tells a receiver that no request will come, and why."""
        with contextlib.suppress(ReshardError):
            self._client.cancel(_scope(name), reason)

    def end(self) -> None:
        """Tells all receivers that the sender has ended: their waits raise ConnectionLost."""
        with contextlib.suppress(ReshardError):
            self._client.end_session()
        self.close()

    def close(self) -> None:
        self._client.close()


def _with_key(request: DistributedUpdateWeightsReq, old: str, new: str) -> DistributedUpdateWeightsReq:
    """Returns the request with `new` for the key `old` of all its addresses. Raises Mismatch for any other key."""

    def changed(address: Address) -> Address:
        if address.key != old:
            raise Mismatch(
                f"{request.name()} came from another control server than the one its receiver is connected to"
            )
        return msgspec.structs.replace(address, key=new)

    return msgspec.structs.replace(request, address=changed(request.address))


def _scope(name: str) -> str:
    return f"receiver/{name}"


def _request(name: str, number: int) -> str:
    return f"request/{name}/{number}"


def _answer(name: str, number: int) -> str:
    return f"answer/{name}/{number}"
