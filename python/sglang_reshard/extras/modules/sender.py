"""Sends updated weights from the trainer ranks to plain torch modules in other processes, without SGLang.

    sender = ModuleSender()                     # on every trainer rank; needs torch.distributed
    collectors.start(sender.metadata)           # they call ModuleReceiver.init(metadata)
    sender.update(model, weight_version="42")   # returns when all of them have the weights

Each receiver is an engine of one rank to the sender; requests and answers go by `extras.request_mail`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sglang_reshard.api.multi_engine import MultiEngineSender
from sglang_reshard.control import Address, ControlServer
from sglang_reshard.errors import Mismatch
from sglang_reshard.extras.asynchronous.background import UpdateHandle
from sglang_reshard.extras.request_mail import MailRoom, to_metadata
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import DEFAULT_TIMEOUT_S
from sglang_reshard.protocol.session import LOOPBACK
from sglang_reshard.sources import NamedTensors
from sglang_reshard.trainer.collectives import on_first_rank
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sglang_reshard.api.given import EnginesAsyncGiven, EnginesGiven, SenderGiven


class ModuleSender:
    """One trainer rank's end. Receivers may come and go between updates.

    metadata  the argument of `ModuleReceiver.init`, the same on every trainer rank. Any process that has it can join
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        interface: str = LOOPBACK,
        relay: bool = False,
        options: SenderOptions | None = None,
        **given: Unpack[SenderGiven],
    ) -> None:
        """Opens a session. Collective over `group`.

        group      process group of the trainer ranks, with a CPU backend; by default all ranks
        interface  address of rank 0's host at which receivers connect to it
        relay      receivers read from each other, see `MultiEngineSender`
        options, given   see `SenderOptions`
        """
        chosen = SenderOptions.of(options, given)
        group = group or dist.group.WORLD
        if group is None:
            raise Mismatch("a ModuleSender needs torch.distributed: call init_process_group on all trainer ranks first")
        self._group, self._timeout_s = group, chosen.timeout_s
        self._server: ControlServer | None = None
        self._mail: MailRoom | None = None
        address = on_first_rank(functools.partial(self._host, interface), group, Address)
        self.metadata = to_metadata(address)
        ranks = tuple(dist.get_process_group_ranks(group))
        rank = dist.get_rank(group)
        self._sender = MultiEngineSender(address, trainer_rank=rank, global_ranks=ranks, relay=relay, options=chosen)

    def wait_for_receivers(self, count: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Waits until `count` receivers have connected. Collective. Raises DeadlineExceeded on every rank."""
        on_first_rank(lambda: self._mail.wait(count, timeout_s) if self._mail else None, self._group)

    def update(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        options: UpdateOptions | None = None,
        **given: Unpack[EnginesGiven],
    ) -> dict[str, UpdateReport]:
        """Updates all receivers to these weights, and returns a report of each once all have them. Collective.

        Arguments and errors are those of `WeightSender.update`. A receiver that has left, or whose process has ended,
        is no longer waited for; a receiver that joins during an update takes part in the next one.
        """
        return self._sender.update(named_tensors, options, **given) if self._meet_receivers() else {}

    def update_async(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        options: UpdateOptions | None = None,
        **given: Unpack[EnginesAsyncGiven],
    ) -> UpdateHandle[dict[str, UpdateReport]]:
        """Copies this rank's shards, and updates all receivers from the copy while the trainer continues. Collective.

        Arguments and errors are those of `WeightSender.update_async`; raises Mismatch if there is no receiver. Waits
        for the previous update: the receivers that are connected now take part in this one.
        """
        self._sender.wait_for_background()
        self._meet_receivers()
        return self._sender.update_async(named_tensors, options, **given)

    def _meet_receivers(self) -> list[str]:
        """Returns the names of the connected receivers; the next update is theirs."""
        names = on_first_rank(lambda: self._mail.receivers() if self._mail else [], self._group)
        mail = self._mail
        sends = {name: None if mail is None else functools.partial(mail.send, name) for name in names}
        self._sender.set_engines(sends)
        return names

    def close(self) -> None:
        """Ends all sessions: receivers that wait raise ConnectionLost. Collective."""
        self._sender.close()
        if self._mail is not None:
            self._mail.end()
        if self._server is not None:
            self._server.close()

    def _host(self, interface: str) -> Address:
        self._server = ControlServer.open(interface)
        self._mail = MailRoom(self._server.address, self._timeout_s)
        return self._server.address
