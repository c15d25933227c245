"""Sends updated weights from the trainer ranks to one engine.

    sender = WeightSender("http://gpu7:30000", admin_api_key=...)     # on every trainer rank
    report = sender.update(model.named_parameters(), weight_version="42")

A trainer rank publishes handles of its shards' memory, which engine ranks on the same host map and read. It sends to
the others, see `trainer.worker`. Its weights must not change until `update` returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from sglang_reshard.api.around_updates import InBackground, Update, probed
from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.control import Address
from sglang_reshard.errors import Mismatch, ReshardError, Unsupported
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import LoraAdapter
from sglang_reshard.protocol.session import LOOPBACK, Session
from sglang_reshard.sources import NamedTensors, TrainerState
from sglang_reshard.trainer.collectives import on_first_rank
from sglang_reshard.trainer.coordinator import Send
from sglang_reshard.trainer.options import SenderOptions, UpdateOptions
from sglang_reshard.trainer.update_sender import UpdateSender

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sglang_reshard.api.given import SenderGiven, UpdateGiven
    from sglang_reshard.extras.asynchronous.background import UpdateHandle
    from sglang_reshard.extras.lora_adapters import LoraAdapters
    from sglang_reshard.extras.probe.probe import Probe

_ENGINE, _NAME = 0, "engine"  # its number in the session, and its name for a probe


class WeightSender(InBackground, UpdateSender):
    """One trainer rank's end of a session with one engine. Not for use from several threads at once."""

    def __init__(
        self,
        url: str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        interface: str | None = None,
        options: SenderOptions | None = None,
        **given: Unpack[SenderGiven],
    ) -> None:
        """Opens a session with a server. Collective over `group`.

        url, api_key, admin_api_key   of the server, see `RemoteEngine`, also for their defaults
        group            process group of the trainer ranks, with a CPU backend; by default all ranks
        interface        address of rank 0's host at which engine ranks connect to it; by default that of the interface
                         towards the server
        options, given   transport, bucket_bytes, timeout_s and others, whole or by name: see `SenderOptions`

        Raises, on every rank: EngineRefused for a server that does not answer, Unauthorized for a wrong key,
        Unsupported for a server without this package, Mismatch for a server with another protocol number, and
        the errors of `SenderOptions`.
        """
        chosen = SenderOptions.of(options, given)
        group = group or dist.group.WORLD
        if group is None:
            raise Mismatch("a WeightSender needs torch.distributed: call init_process_group on all trainer ranks first")
        keys = {"api_key": api_key, "admin_api_key": admin_api_key}
        remote, reached = connect_server(group, url, **keys, timeout_s=chosen.timeout_s)
        send = remote.update_weights_distributed if remote is not None else None
        self._begin(send, *_open_session(group, interface or reached, chosen.timeout_s), chosen)

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        send: Send | None,
        *,
        interface: str = LOOPBACK,
        options: SenderOptions | None = None,
        **given: Unpack[SenderGiven],
    ) -> WeightSender:
        """Opens a session with an engine to which `send` sends requests. Collective over `group`.

        group  process group of the trainer ranks, with a CPU backend
        send   sends a request to the engine and returns its answer; on rank 0 of the group, None on the others
        options, given   see `SenderOptions`
        """
        sender, chosen = cls.__new__(cls), SenderOptions.of(options, given)
        sender._begin(send, *_open_session(group, interface, chosen.timeout_s), chosen)
        return sender

    @classmethod
    def within(
        cls,
        session: Session,
        *,
        trainer_rank: int,
        global_ranks: tuple[int, ...],
        send: Send | None,
        options: SenderOptions | None = None,
        **given: Unpack[SenderGiven],
    ) -> WeightSender:
        """Uses an open session.

        global_ranks  the rank of each trainer rank in torch.distributed's world, as device meshes list them
        send          sends a request to the engine and returns its answer; on trainer rank 0, None on the others
        options, given   see `SenderOptions`
        """
        sender = cls.__new__(cls)
        sender._begin(send, session, trainer_rank, global_ranks, SenderOptions.of(options, given))
        return sender

    def update(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        options: UpdateOptions | None = None,
        *,
        probe: Probe | None = None,
        **given: Unpack[UpdateGiven],
    ) -> UpdateReport:
        """Updates the engine to these weights. Collective: all trainer ranks pass the same names in the same order.

        named_tensors   (name, tensor) pairs, a state dict, or the module itself, see `sglang_reshard.sources.describe`;
                        the shards are not gathered
        options, given  weight_version, verify, staged and others, whole or by name: see `UpdateOptions`
        probe           compare the engine's log-probabilities of a few tokens with the trainer's once the weights are
                        live, see `probe.Probe`; the report's `probe` has the differences

        Raises, on every trainer rank: Unsupported or Mismatch for weights that cannot be sent, DeadlineExceeded for a
        rank that does not participate, EngineRefused if the engine refuses them. After these errors the old weights
        keep serving, unless the message says that all engine ranks had already written. After TornWeights the engine
        refuses requests until an update succeeds. Raises Aborted or ConnectionLost if a trainer rank cancelled the
        update or died before the engine answered; if the engine's weights are torn, it refuses to generate. Raises
        ProbeMismatch after a successful update, if a probe's threshold is exceeded.
        """
        weights, update = self._probed(probe, named_tensors, self._chosen(options, given, named_tensors))
        return update(weights)[_NAME]

    def update_async(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        options: UpdateOptions | None = None,
        *,
        latest_only: bool = False,
        shadow_device: torch.device | None = None,
        probe: Probe | None = None,
        **given: Unpack[UpdateGiven],
    ) -> UpdateHandle[UpdateReport]:
        """Copies this rank's shards, and updates the engine from the copy while the trainer continues. Collective.

            handle = sender.update_async(model, weight_version="7", staged=True)
            train_one_step()                # may change the weights
            report = handle.wait()

        options, given  of `update`; with `unmap_after`, views of the shards are dropped once they are copied, for a
                        trainer that offloads or frees them now, and engine ranks keep the copy mapped
        latest_only     if an update still runs, as trainer rank 0 sees it, skip this version instead of waiting for its
                        end: the handle says so, and the next one names it
        shadow_device   where the copy is; by default on the device of each shard. It takes as much memory as the shards
                        of this rank, and is kept for the next call until `release` or `close`
        probe           of `update`: the trainer computes its part before this returns, the engine after the update

        Without `latest_only` it waits for the previous update. Raises the error of that update, unless its handle has
        already raised it; in this case nothing is copied. Call the same methods of a handle on all ranks. Only one
        thread may call methods of a sender; while the update runs, only methods of the handle may be called.
        """
        chosen = self._chosen(options, given, named_tensors)
        weights, update = self._probed(probe, named_tensors, dataclasses.replace(chosen, unmap_after=False))

        def run(copy: TrainerState | NamedTensors) -> UpdateReport:
            return update(copy)[_NAME]

        return self.background.start(self, run, weights, chosen, latest_only=latest_only, shadow_device=shadow_device)

    def release(self) -> None:
        """Drops views of the shards, see `UpdateSender.release`, and the copy of `update_async`, once it has ended."""
        self._release_background()
        super().release()

    @property
    def participant(self) -> UpdateSender:
        """The `UpdateSender` that takes part in the session, as in a `MultiEngineSender`."""
        return self

    def _probed(self, probe: Probe | None, weights: Any, options: UpdateOptions) -> tuple[Any, Update]:
        def update(weights: Any) -> dict[str, UpdateReport]:
            outcome = self.update_engines(weights, options)[_ENGINE]
            if isinstance(outcome, ReshardError):
                raise outcome
            return {_NAME: outcome}

        return probed(probe, self, {_NAME: self._send}, weights, update)

    def lora_adapter(self, name: str, config: str, base: NamedTensors | torch.nn.Module | None = None) -> WeightSender:
        """Opens a session for a LoRA adapter that the same engine serves. Collective.

            policy = sender.lora_adapter("policy", adapter_config(model))
            policy.update(adapter_tensors(model), weight_version="42")     # only the adapter's tensors move

        name    requests select it with this `lora_path`; the engine need not have it yet
        config  see `sources.adapter_config`
        base    `base_tensors(model)`, for an adapter whose initialization has changed the base weights (PiSSA): the
                engine is updated to them first. Pause it until the adapter's first update if requests use the name
                already: they would compute with the old adapter over the new base

        Every engine rank receives the whole adapter, as SGLang keeps it, in separate memory. It replaces the served
        adapter once all ranks have all of it. Requests see the old adapter or the new one, as in other updates. If an
        engine fails while it replaces the adapter, requests for it are refused until an update of it succeeds; the
        model and other adapters keep serving.
        """
        self._check_closed(name, f"lora_adapter was already called for {name}")
        if base is not None:
            from sglang_reshard.sources.lora_config import with_base

            config = with_base(config)
        lora = UpdateOptions(lora=[LoraAdapter(name, config)]).lora
        if base is not None:
            self.update(base)
        self._adapters[name] = adapter = WeightSender.__new__(WeightSender)
        adapter._begin(self._send, *self._join(name))
        adapter._lora = lora
        return adapter

    def lora_adapters(self) -> LoraAdapters:
        """Opens a session whose updates bring any number of LoRA adapters, all or none, see `LoraAdapters`."""
        from sglang_reshard.extras.lora_adapters import LoraAdapters

        self._check_closed("", "lora_adapters was already called")
        self._adapters[""] = adapters = LoraAdapters(self._send, *self._join(""))
        return adapters

    def _check_closed(self, name: str, already: str) -> None:
        if name in self._adapters and not self._adapters[name]._closed:
            raise Mismatch(f"{already}; use the sender that it returned")

    def _join(self, name: str) -> tuple[Session, int, tuple[int, ...], SenderOptions]:
        """Joins the session of an adapter, or of several. Returns the arguments of `UpdateSender`."""
        session = Session.join(self.session.address.named(f"lora/{name}"), self.timeout_s)
        return session, self._rank, self._global_ranks, dataclasses.replace(self._options, delta="off")

    def _chosen(self, options: UpdateOptions | None, given: Mapping[str, Any], weights: Any) -> UpdateOptions:
        return UpdateOptions.of(options, {**given, "lora": self._lora} if self._lora else given, weights)

    def _begin(self, send: Send | None, *arguments: Any) -> None:
        """`arguments` are those of `UpdateSender`."""
        super().__init__(*arguments)
        self._send = send
        self._lora: Sequence[LoraAdapter] = ()  # that all updates bring, in place of the model's own weights
        self._adapters: dict[str, UpdateSender] = {}
        self.set_engines({_ENGINE: send})

    def close(self) -> None:
        """Ends the session, and those of its LoRA adapters. Collective. Engine ranks unmap the shards' memory."""
        self._release_background()
        for adapter in self._adapters.values():
            adapter.close()
        super().close()


def connect_server(group: dist.ProcessGroup, url: str | None, **options: Any) -> tuple[RemoteEngine | None, str]:
    """Checks the server from the group's first rank. Collective.

    Returns the client on the first rank (None on others), and the address of the first rank's interface towards the
    server. `options` are those of `RemoteEngine`. Raises the errors of `RemoteEngine.check` on every rank.
    """
    remote: list[RemoteEngine] = []

    def connect() -> str:
        remote.append(RemoteEngine(url, **options))
        remote[0].check()
        return remote[0].local_address()

    address = on_first_rank(connect, group)
    return (remote[0] if remote else None), address


def _open_session(group: dist.ProcessGroup, interface: str, timeout_s: float) -> tuple[Session, int, tuple[int, ...]]:
    """Opens a session that the group's rank 0 hosts on `interface`. Collective.

    Returns it with the trainer rank, and the global rank of each trainer rank.
    """
    hosted: list[Session] = []

    def host() -> Address:
        try:
            hosted.append(Session.host(interface, timeout_s))
        except OSError as error:
            raise Unsupported(
                f"interface={interface!r} is not an address of trainer rank 0's host: {error}. Pass an address of that "
                "host which engine ranks can reach"
            ) from error
        return hosted[0].address

    address = on_first_rank(host, group, Address)
    session = hosted[0] if hosted else Session.join(address, timeout_s)
    return session, dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
