"""An engine bounds an update's whole time, whatever its trainer does and whatever the request says.

And it finds out whether the trainer is there before it stops serving.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_reshard.control import Address, ControlClient, ControlServer
from sglang_reshard.engine.trainer_presence import TrainerPresence
from sglang_reshard.errors import DeadlineExceeded, EngineRefused, Mismatch, ReshardError
from sglang_reshard.protocol.messages import DistributedUpdateWeightsReq
from sglang_reshard.protocol.validation import MAX_UPDATE, check_request
from sglang_reshard.trainer.worker import EngineTransfers
from sglang_reshard.version import PROTOCOL, __version__
from support.toy import ToyRank, checkpoint
from support.toy_serving import receiver_of
from support.world import run_world

LIMIT_S = 1.5
MOST_S = LIMIT_S + 4.0  # until the rank has cleaned up


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process only: those that `run_world` starts have the environment of the first test that used it."""
    monkeypatch.setenv(MAX_UPDATE, str(LIMIT_S))


def request(address: Address, timeout_s: float = LIMIT_S) -> DistributedUpdateWeightsReq:
    return DistributedUpdateWeightsReq(
        address=address, update=1, layout="0" * 32, handles=("h",), trainer_hosts=("x",), timeout_s=timeout_s,
        package_version=__version__, protocol=PROTOCOL,
    )  # fmt: skip


@contextlib.contextmanager
def silent() -> Iterator[Address]:
    """Its kernel accepts connections, and nobody serves them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Address("s", "127.0.0.1", listener.getsockname()[1], secrets.token_hex(32))


@contextlib.contextmanager
def of_others() -> Iterator[Address]:
    """A session that this update is not in."""
    server = ControlServer.open()
    try:
        yield server.address.named("weights")
    finally:
        server.close()


@contextlib.contextmanager
def in_the_update() -> Iterator[Address]:
    """Its trainer is in the update, and publishes nothing."""
    with of_others() as address, ControlClient(address, 10) as client:
        client.enter("update/1", "trainer rank 0")
        yield address


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("trainer", [silent, of_others, in_the_update])
def test_an_engine_rank_ends_an_update_whose_trainer_hangs(trainer: Any) -> None:
    receiver = receiver_of(ToyRank(0, 1))
    with trainer() as address:
        started = time.monotonic()
        output = receiver.update(request(address))
        seconds = time.monotonic() - started
    receiver.close()
    assert not output.success
    assert not output.torn
    assert seconds < MOST_S


def _train(trainer: Any) -> tuple[float, str]:
    sender = trainer.sender(timeout_s=LIMIT_S, transport="p2p")
    started = time.monotonic()
    with pytest.raises(ReshardError) as raised:
        sender.update(checkpoint(1).items())
    return time.monotonic() - started, str(raised.value)


def _train_and_hang(trainer: Any) -> tuple[float, str]:
    """Each wait ends before its deadline; together they take too long."""
    with pytest.MonkeyPatch.context() as patch:
        execute = EngineTransfers.execute

        def slowly(*args: Any) -> Any:
            time.sleep(0.8 * LIMIT_S)
            return execute(*args)

        patch.setattr(EngineTransfers, "execute", slowly)
        return _train(trainer)


def _serve(rank: int, size: int, requests: Any) -> list[tuple[float, bool]]:
    outcomes = []
    receiver = receiver_of(ToyRank(rank, size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MAX_UPDATE, str(LIMIT_S))
        for asked in requests:
            started = time.monotonic()
            output = receiver.update(asked)
            outcomes.append((time.monotonic() - started, output.torn))
            requests.answer(output)
    return outcomes


def test_the_sum_of_all_waits_is_bounded() -> None:
    trainers, engines = run_world(2, 2, _train_and_hang, _serve, deadline_s=60)
    for seconds, message in trainers:
        assert seconds >= LIMIT_S
        assert f"did not end within {LIMIT_S} s, the engine's limit ({MAX_UPDATE})" in message
    for ((seconds, torn),) in engines:
        assert seconds < MOST_S
        assert not torn


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("timeout_s", [LIMIT_S + 0.1, 1e9, float("inf")])
def test_a_timeout_above_the_limit_is_refused(timeout_s: float) -> None:
    asked = request(Address("s", "127.0.0.1", 1, "0" * 64), timeout_s)
    with pytest.raises(
        Mismatch, match=rf"timeout_s=.* exceeds this engine's limit of {LIMIT_S} seconds .* {MAX_UPDATE}"
    ):
        check_request(asked)
    output = receiver_of(ToyRank(0, 1)).update(asked)
    assert MAX_UPDATE in output.message


@pytest.mark.parametrize("given", ["", "an hour", "-1", "nan", "0"])
def test_a_limit_that_is_none_is_named(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_UPDATE, given)
    with pytest.raises(
        Mismatch, match=rf"{MAX_UPDATE}='{given}' in this engine's environment is not a number of seconds"
    ):
        check_request(request(Address("s", "127.0.0.1", 1, "0" * 64), 1.0))


# -- before the engine stops serving


@pytest.mark.parametrize(
    ("trainer", "kind", "message"),
    [
        (silent, DeadlineExceeded, "did not answer within 0.5 s"),
        (of_others, EngineRefused, "the trainer is not in update 1 of session"),
        (in_the_update, DeadlineExceeded, "did not publish the source layout and memory handles of update 1"),
    ],
)
def test_a_trainer_that_is_not_there_is_found_out(trainer: Any, kind: type[ReshardError], message: str) -> None:
    trainers = TrainerPresence()
    with trainer() as address, pytest.raises(kind, match=message):
        trainers.find(request(address, 0.5))
    trainers.close()


def test_connections_to_the_trainers_of_several_adapters_are_kept_and_not_all() -> None:
    def clients() -> int:
        return sum(thread.name == "sglang-reshard control client" for thread in threading.enumerate())

    def become(most: int) -> bool:
        end = time.monotonic() + 10
        while clients() > most and time.monotonic() < end:
            time.sleep(0.01)
        return clients() <= most

    before, trainers = clients(), TrainerPresence()
    with of_others() as address:
        for adapter in [*range(12), *range(12)]:
            with pytest.raises(EngineRefused):
                trainers.find(request(address.named(f"lora/{adapter}")))
        assert become(before + 8)
        trainers.close()
        assert become(before)
