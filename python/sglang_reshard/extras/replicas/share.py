"""Shares one engine rank's live weights with other engines: the rank takes part in their updates as a trainer rank.

An update runs as from any trainer, in a thread, while the engine continues to serve. The live weights must not be
written during this time: the tokenizer manager waits for `wait_until_shared` before it lets them be. The two engines
meet on a control server that the sharing engine's tokenizer manager hosts; the request waits there until the other
engine takes it.
"""

from __future__ import annotations

import functools
import threading
from contextlib import ExitStack, nullcontext, suppress

import torch

from sglang_reshard import tasks
from sglang_reshard.control import Address, ControlClient, ControlServer, WaitTimedOut
from sglang_reshard.engine.receiver import WeightReceiver
from sglang_reshard.errors import EngineRefused, ReshardError
from sglang_reshard.extras.request_mail import MailRoom
from sglang_reshard.gpu.runtime import runtime
from sglang_reshard.memory.mapping import MemoryExporter
from sglang_reshard.observability.logs import get_logger
from sglang_reshard.protocol.messages import WAITS, DistributedUpdateWeightsOutput, ShareWeightsReq
from sglang_reshard.protocol.session import Session
from sglang_reshard.protocol.validation import max_update_s
from sglang_reshard.trace.live_shards import LiveShard, live_shards
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from sglang_reshard.trainer.update_sender import UpdateSender

logger = get_logger(__name__)
_ENGINE = 0  # number in the session of the one that takes them
_JOIN_S = 30.0  # within which the other engine joins
_END_S = 5.0  # within which the other engine ranks end after the first, unless they wait for it
_WEIGHTS, _SHARING = "weights", "sharing"  # sessions of the control server: of the update, and of the sharing engine


class LiveWeights:
    """One engine rank's side. `start` is called on every engine rank."""

    def __init__(self, receiver: WeightReceiver, rank: int, size: int, device: torch.device) -> None:
        """`rank` is the engine rank among `size`."""
        self._receiver, self._rank, self._size, self._device = receiver, rank, size, device
        self._memory = MemoryExporter(rank)
        self._preparing = threading.Lock()

    def start(self, request: ShareWeightsReq) -> DistributedUpdateWeightsOutput:
        """Starts a thread that shares the weights with one engine. Returns a failure if they cannot be shared."""
        try:
            with self._preparing:
                shards = self._shards()
        except ReshardError as error:
            return DistributedUpdateWeightsOutput(success=False, message=str(error))
        tasks.start("share", functools.partial(self._share, request, shards))
        return DistributedUpdateWeightsOutput(success=True, message="")

    def _shards(self) -> list[LiveShard]:
        program, shapes = self._receiver.live_program()
        shards = live_shards(program, shapes, self._rank)
        # Host memory is moved into shared memory here, where no forward pass reads it at its old place.
        moves = self._device.type == "cpu" and not all(shard.tensor.is_shared() for shard in shards)
        with self._receiver.moving_memory() if moves else nullcontext():
            self._memory.begin_update()
            self._memory.export([shard.tensor for shard in shards], [shard.name for shard in shards])
        return shards

    def _share(self, request: ShareWeightsReq, shards: list[LiveShard]) -> None:
        assert request.address is not None
        client = None
        try:
            client = ControlClient(request.address.named(_SHARING), request.timeout_s)
            with runtime().own_stream(self._device):
                self._update(request, request.address, shards)
        except Exception as error:  # the other engine reports it
            logger.warning("engine rank %d could not share its live weights: %s", self._rank, error)
        finally:
            if client is not None:
                with suppress(ReshardError):
                    client.set({_ended(self._rank): b""})
                    client.close()

    def _update(self, request: ShareWeightsReq, address: Address, shards: list[LiveShard]) -> None:
        with ExitStack() as stack:
            send, mail, name = None, None, ""
            if self._rank == 0:
                mail = MailRoom(address, request.timeout_s)
                stack.callback(mail.close)
                mail.wait(1, _JOIN_S)
                name = next(iter(mail.receivers()), "")
                if not name:
                    raise EngineRefused(
                        "the pulling engine disconnected before the transfer started; look at its log and pull again"
                    )

                send = functools.partial(mail.send, name)
            session = Session.join(address.named(_WEIGHTS), request.timeout_s)
            of_sender = SenderOptions(request.transport, request.bucket_bytes, request.timeout_s)
            sender = UpdateSender(session, self._rank, tuple(range(self._size)), of_sender, self._memory)
            stack.callback(sender.close)
            sender.set_engines({_ENGINE: send})
            named_tensors = [(shard.name, shard.tensor, shard.sharding) for shard in shards]
            options = UpdateOptions(request.weight_version, verify=request.verify, partial=True)
            try:
                outcome = sender.update_engines(named_tensors, options)[_ENGINE]
                if isinstance(outcome, ReshardError):
                    raise outcome
            except Exception as error:
                if mail is not None:
                    mail.refuse(name, str(error))  # unless it has the request, and knows
                raise


def has_begun(server: ControlServer, engine_ranks: int) -> bool:
    """Returns whether an engine rank of the other engine takes part, next to the `engine_ranks` that share."""
    return server.clients(server.address.named(_WEIGHTS).session) > engine_ranks


def wait_until_shared(request: ShareWeightsReq, engine_ranks: int) -> None:
    """Waits until no engine rank reads its live weights for `request`, or all deadlines have passed.

    Called in the process that hosts the control server, in a separate thread.
    """
    assert request.address is not None
    with suppress(WaitTimedOut, ReshardError), ControlClient(request.address.named(_SHARING), _JOIN_S) as client:
        client.get([_ended(0)], min(WAITS * request.timeout_s, max_update_s()))  # it sends the update's request
        client.get([_ended(rank) for rank in range(engine_ranks)], _END_S)


def _ended(engine_rank: int) -> str:
    return f"ended/{engine_rank}"
