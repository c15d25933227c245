"""Sends updated weights from the trainer ranks to one engine.

    sender = WeightSender("http://gpu7:30000", admin_api_key=...)     # on every trainer rank
    report = sender.update(model.named_parameters(), weight_version="42")

A trainer rank publishes handles of its shards' memory, which engine ranks on the same host map and read. It sends to
the others, see `trainer.engine_transfers`. Its weights must not change until `update` returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import torch.distributed as dist

from sglang_reshard._deprecated import renamed_keywords
from sglang_reshard.api.probed import Update, probed
from sglang_reshard.api.remote_engine import RemoteEngine
from sglang_reshard.api.snapshot_methods import SnapshotMethods
from sglang_reshard.control import Address
from sglang_reshard.errors import EngineUnreachable, Mismatch, ReshardError, Unsupported
from sglang_reshard.layout.decoders import convert
from sglang_reshard.observability.report import UpdateReport
from sglang_reshard.protocol.messages import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT_S, Delta, LoraAdapter, Verify
from sglang_reshard.protocol.session import LOOPBACK, Session
from sglang_reshard.sources import NamedTensors, TrainerState
from sglang_reshard.sources.names import Rename, Renaming, patterns
from sglang_reshard.trainer.background import BackgroundUpdates, UpdateHandle
from sglang_reshard.trainer.collectives import on_first_rank
from sglang_reshard.trainer.coordinator import Send, SenderConfig, UpdateOptions
from sglang_reshard.trainer.update_sender import UpdateSender, repeatable

if TYPE_CHECKING:
    from sglang_reshard.probe.probe import Probe

_ENGINE, _NAME = 0, "engine"  # its number in the session, and its name for a probe
_FALLBACKS = 3  # snapshots that stay in the folder of `fallback`


class WeightSender(SnapshotMethods, UpdateSender):
    """One trainer rank's end of a session with one engine. Not for use from several threads at once."""

    def __init__(
        self,
        url: str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        interface: str | None = None,
        transport: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        delta: Delta = "off",
        delta_device: torch.device | None = None,
    ) -> None:
        """Opens a session with a server. Collective over `group`.

        url, api_key, admin_api_key   of the server, see `RemoteEngine`, also for their defaults
        group         process group of the trainer ranks, with a CPU backend; by default all ranks
        interface     address of rank 0's host at which engine ranks connect to it; by default that of the interface
                      towards the server
        transport     "auto", "ipc", "p2p", "broadcast" or "nixl", see `plan.strategy`
        bucket_bytes  size of a bucket; a rank holds at most two
        timeout_s     seconds that any one wait may last
        delta         "auto" sends only what has changed since the update before, bit for bit, where weights are sent
                      and that is at most half of their bytes. Trainer ranks keep what they have sent, in the
                      engine's dtypes; engines need no memory for it but buckets
        delta_device  where trainer ranks keep it; by default where messages are packed

        Raises, on every rank: EngineRefused for a server that does not answer, Unauthorized for a wrong key,
        Unsupported for a server without this package, or delta="auto" with a transport by which nothing is sent,
        Mismatch for a server with another version of the package.
        """
        group = group or dist.group.WORLD
        if group is None:
            raise Mismatch("a WeightSender needs torch.distributed: call init_process_group on all trainer ranks first")
        remote, reached = connect_server(group, url, api_key=api_key, admin_api_key=admin_api_key, timeout_s=timeout_s)
        send = remote.update_weights_distributed if remote is not None else None
        config = SenderConfig(transport, bucket_bytes, timeout_s, None, delta, delta_device)
        self._begin(send, *_open_session(group, interface or reached, timeout_s), config)

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        send: Send | None,
        *,
        interface: str = LOOPBACK,
        transport: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        delta: Delta = "off",
        delta_device: torch.device | None = None,
    ) -> WeightSender:
        """Opens a session with an engine to which `send` sends requests. Collective over `group`.

        group  process group of the trainer ranks, with a CPU backend
        send   sends a request to the engine and returns its answer; on rank 0 of the group, None on the others
        """
        sender = cls.__new__(cls)
        config = SenderConfig(transport, bucket_bytes, timeout_s, None, delta, delta_device)
        sender._begin(send, *_open_session(group, interface, timeout_s), config)
        return sender

    @classmethod
    def within(
        cls,
        session: Session,
        *,
        trainer_rank: int,
        global_ranks: tuple[int, ...],
        send: Send | None,
        transport: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        lora: LoraAdapter | None = None,
        delta: Delta = "off",
        delta_device: torch.device | None = None,
    ) -> WeightSender:
        """Uses a session that is open already.

        global_ranks  the rank of each trainer rank in torch.distributed's world, as device meshes list them
        send          sends a request to the engine and returns its answer; on trainer rank 0, None on the others
        lora          the adapter that is updated, see `lora_adapter`; by default the model's own weights
        """
        sender = cls.__new__(cls)
        config = SenderConfig(transport, bucket_bytes, timeout_s, lora, delta, delta_device)
        sender._begin(send, session, trainer_rank, global_ranks, config)
        return sender

    @renamed_keywords(let_go="unmap_after")
    def update(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        ignore: Sequence[str] = (),
        check_finite: bool = False,
        verify: Verify = "off",
        staged: bool = False,
        unmap_after: bool = False,
        partial: bool = False,
        draft: bool = True,
        rename: Rename | None = None,
        frozen: Sequence[str] = (),
        only: Sequence[str] = (),
        probe: Probe | None = None,
        fallback: Literal["raise", "disk"] = "raise",
        fallback_folder: str | Path | None = None,
    ) -> UpdateReport:
        """Updates the engine to these weights. Collective: all trainer ranks pass the same names in the same order.

        named_tensors   (name, tensor) pairs, a state dict, or the module itself, see `sglang_reshard.sources.describe`;
                        the shards are not gathered
        weight_version  the engine's weight_version from now on; None leaves it unchanged
        ignore          fnmatch patterns ("model.layers.61.*") of names that the engine need not read. Any other name
                        that it does not read is refused, unless it is tied to a tensor that is sent
        check_finite    refuse shards with NaN or infinite values
        verify          compare checksums of the received weights with the trainer's: "full" reads every element on both
                        sides once more, "sample" one row in 64, others in each update
        staged          receive into shadow weights: a failure before all have arrived and been verified leaves the old
                        weights serving. Takes as much memory again as the weights
        unmap_after     engine ranks unmap the shards' memory at the end, for a trainer that offloads it now: freed
                        memory that another process maps is not free. The next update maps it again, and plans again
        partial         each trainer rank passes the tensors that it holds, and others other ones: the layers of its
                        pipeline stage, its own experts. A plain tensor is held by the ranks that pass it. Names and
                        shardings are agreed on by metadata only; in an unchanged update, by a hash of each rank
        draft           update the draft models of speculative decoding too, from these tensors, or from those named
                        "draft.<name>" if there are any. False leaves them as they are
        rename          the names to send the tensors under: a dict of prefixes, old -> new, or a function from name to
                        name. Pass the same function object in every update. `ignore` refers to the new names
        frozen          fnmatch patterns ("visual.*") of the engine's parameters that may keep their live values, if
                        nothing that is sent reaches them. Those that do are the report's `kept`
        only            fnmatch patterns of the engine's parameters that must be written; all others are as `frozen`
        probe           compare the engine's log-probabilities of a few tokens with the trainer's once the weights are
                        live, see `probe.Probe`; the report's `probe` says how far they differ
        fallback        "disk": if the engine's server does not answer, write a snapshot named `weight_version` to
                        `fallback_folder` instead of raising, see `snapshot`; the report has success=False then, and
                        transport="disk". A follower of the folder loads it, unless a later update has succeeded

        Raises, on every trainer rank: Unsupported or Mismatch for weights that cannot be sent, DeadlineExceeded for a
        rank that does not participate, EngineRefused for what the engine refuses. The old weights keep serving then,
        except after TornWeights: only a successful update restores the engine. Raises Aborted or ConnectionLost if a
        rank has died before the engine answered; if its weights are torn, it refuses to generate. Raises ProbeMismatch
        after an update that has succeeded, if a probe's threshold is exceeded.
        """
        options = UpdateOptions(
            weight_version,
            flush_cache,
            abort_all_requests,
            patterns(ignore) if ignore else (),
            check_finite,
            verify,
            staged,
            unmap_after,
            partial,
            draft,
            Renaming.of(rename) if rename is not None else None,
            patterns(frozen) if frozen else (),
            patterns(only) if only else (),
        )
        if fallback == "raise":
            weights, update = self._probed(probe, named_tensors, options)
            return update(weights)[_NAME]
        if fallback != "disk" or fallback_folder is None or weight_version is None:
            raise Unsupported("fallback must be 'raise', or 'disk' with a fallback_folder and a weight_version")
        again = repeatable(named_tensors)
        weights, update = self._probed(probe, again, options)
        try:
            return update(weights)[_NAME]
        except EngineUnreachable as error:
            written = self.snapshot(
                again, fallback_folder, name=weight_version, partial=partial, rename=rename, keep=_FALLBACKS, delta=True
            )
            message = f"{error} The weights are in {written.path}"
            return msgspec.structs.replace(UpdateReport.failed(message, weight_version), transport="disk")

    def update_async(
        self,
        named_tensors: NamedTensors | torch.nn.Module,
        *,
        latest_only: bool = False,
        shadow_device: torch.device | None = None,
        probe: Probe | None = None,
        **options: Any,
    ) -> UpdateHandle[UpdateReport]:
        """Copies this rank's shards, and updates the engine from the copy while the trainer goes on. Collective.

            handle = sender.update_async(model, weight_version="7", staged=True)
            train_one_step()                # may change the weights
            report = handle.wait()

        latest_only    if an update still runs, as trainer rank 0 sees it, skip this version instead of waiting for its
                       end: the handle says so, and the next one names it
        shadow_device  where the copy is; by default on the device of each shard. It takes as much memory as the shards
                       of this rank, and is kept for the next call until `release` or `close`
        probe          of `update`: the trainer computes its part before this returns, the engine after the update
        options        of `update`; with `unmap_after`, views of the shards are dropped once they are copied, for a
                       trainer that offloads or frees them now, and engine ranks keep the copy mapped

        Without `latest_only` it waits for the update before. Raises what that has failed with, unless its handle has
        raised it already; nothing is copied then, and ranks have to treat their handles alike. Only one thread may
        call methods of a sender; of those only handles' may be called while the update runs.
        """
        chosen = UpdateOptions.of(options)
        weights, update = self._probed(probe, named_tensors, dataclasses.replace(chosen, unmap_after=False))

        def run(copy: TrainerState | NamedTensors) -> UpdateReport:
            return update(copy)[_NAME]

        return self._background.start(self, run, weights, chosen, latest_only=latest_only, shadow_device=shadow_device)

    def release(self) -> None:
        """Drops views of the shards, see `UpdateSender.release`, and the copy of `update_async`, once it has ended."""
        self._background.release()
        super().release()

    def _snapshots_of(self) -> UpdateSender:
        return self

    def _probed(self, probe: Probe | None, weights: Any, options: UpdateOptions) -> tuple[Any, Update]:
        def update(weights: Any) -> dict[str, UpdateReport]:
            return {_NAME: self._update_engine(weights, options)}

        return (weights, update) if probe is None else probed(probe, self, {_NAME: self._send}, weights, update)

    def _update_engine(
        self, weights: NamedTensors | torch.nn.Module | TrainerState, options: UpdateOptions
    ) -> UpdateReport:
        outcome = self.update_engines(weights, options)[_ENGINE]
        if isinstance(outcome, ReshardError):
            raise outcome
        return outcome

    def lora_adapter(self, name: str, config: str) -> WeightSender:
        """Opens a session for a LoRA adapter that the same engine serves. Collective.

            policy = sender.lora_adapter("policy", adapter_config(model))
            policy.update(adapter_tensors(model), weight_version="42")     # only the adapter's tensors move

        name    under which requests ask for it, as `lora_path`; the engine need not have it yet
        config  see `sources.adapter_config`

        Every engine rank receives the whole adapter, as SGLang keeps it, beside the one that is served, which it
        replaces once all ranks have all of it. Requests see the old adapter or the new one, as in other updates. If an
        engine fails while it replaces the adapter, requests for it are refused until an update of it succeeds; the
        model and other adapters keep serving.
        """
        if name in self._adapters and not self._adapters[name]._closed:
            raise Mismatch(f"lora_adapter was called for {name} before; use the sender that it returned")
        session = Session.join(self._session.address.named(f"lora/{name}"), self._timeout_s)
        self._adapters[name] = adapter = WeightSender.__new__(WeightSender)
        options = dataclasses.replace(self._config, lora=LoraAdapter(name, config), delta="off")
        adapter._begin(self._send, session, self._rank, self._global_ranks, options)
        return adapter

    def _begin(self, send: Send | None, *arguments: Any) -> None:
        """`arguments` are those of `UpdateSender`."""
        super().__init__(*arguments)
        self._send = send
        self._adapters: dict[str, WeightSender] = {}
        self._background = BackgroundUpdates[Any]()  # of updates and snapshots
        self.set_engines({_ENGINE: send})

    def close(self) -> None:
        """Ends the session, and those of its LoRA adapters. Collective. Engine ranks unmap the shards' memory."""
        self._background.close()
        for adapter in self._adapters.values():
            adapter.close()
        super().close()


def connect_server(group: dist.ProcessGroup, url: str | None, **options: Any) -> tuple[RemoteEngine | None, str]:
    """Checks the server from the group's first rank. Collective.

    Returns the client on the first rank (None on others), and the address of the first rank's interface towards the
    server. `options` are those of `RemoteEngine`. Raises on every rank what `RemoteEngine.check` raises on the first.
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

    def host() -> Any:
        try:
            hosted.append(Session.host(interface, timeout_s))
        except OSError as error:
            raise Unsupported(f"interface={interface!r} is not an address of trainer rank 0's host: {error}") from error
        return msgspec.to_builtins(hosted[0].address)

    address = convert(on_first_rank(host, group), Address)
    session = hosted[0] if hosted else Session.join(address, timeout_s)
    return session, dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
